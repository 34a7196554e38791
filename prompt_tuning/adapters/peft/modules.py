"""Our projections, the modules that transformers makes of them, and PEFT's choice.

Names come from the tables that read the model (`checkpoints.huggingface`). GPT-2 keeps
query, key and value in one module, of which each is a part.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import FusedPart, transpose
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import FAMILIES, hf_folder

ALL_LINEAR = "all-linear"
# Adapters of a base model, without its head, lack the prefix of its names.
HEADLESS = ("", *sorted({family.base_prefix for family in FAMILIES.values()} - {""}))


@dataclasses.dataclass(frozen=True)
class Projection:
    """One projection of a stack.

    Attributes:
      path: ours, such as "decoder/layers/self_attention/query".
      modules: the module of each layer, as transformers names it.
      part: which part of those modules it is, and of how many; (0, 1) for all.
      size_in: numbers that go in.
      size_out: numbers that come out.
      in_first: whether a module's weight is stored `[in, out]` (GPT-2's `Conv1D`).
    """

    path: str
    modules: tuple[str, ...]
    part: tuple[int, int]
    size_in: int
    size_out: int
    in_first: bool

    @property
    def scales_input(self) -> bool:
        """Whether IA3 multiplies what goes in (Liu et al. 2022, section 3.3)."""
        return self.path.endswith("/mlp/down")


def projections(
    config: ModelConfig, names: Collection[str] = ()
) -> dict[str, Projection]:
    """Every projection of a model, by our path.

    Args:
      config: the model.
      names: those of a checkpoint's arrays, for modules named as they are there;
        without them as in a model with its head.
    """
    sizes = _sizes(config)
    found = {}
    for path, recipe in hf_folder.find_recipes(config, names).items():
        projection = path.removesuffix("/kernel")
        kind = "/".join(projection.split("/")[-2:])
        if projection == path or kind not in sizes:
            continue
        part = recipe.transform
        fused = isinstance(part, FusedPart)
        found[projection] = Projection(
            projection,
            tuple(name.removesuffix(".weight") for name in recipe.sources),
            (part.index, part.parts) if fused else (0, 1),
            *sizes[kind],
            in_first=part is not transpose,
        )
    return found


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Numbers in and out of each kind of projection."""
    width, inner = config.width, config.feed_forward_width
    queries = config.heads * config.head_width
    keys = config.key_value_heads * config.head_width
    attention = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
    }
    return {
        **{
            f"{place}/{name}": size
            for place in ("self_attention", "cross_attention")
            for name, size in attention.items()
        },
        "mlp/gate": (width, inner),
        "mlp/up": (width, inner),
        "mlp/down": (inner, width),
    }


def by_module(known: Mapping[str, Projection]) -> dict[str, list[Projection]]:
    """The projections that each module holds, in the order of their parts."""
    found: dict[str, list[Projection]] = {}
    for projection in known.values():
        for module in projection.modules:
            found.setdefault(module, []).append(projection)
    return {
        module: sorted(parts, key=lambda projection: projection.part)
        for module, parts in found.items()
    }


def full_name(module: str, known: Collection[str], source: str) -> str:
    """A module's name, completed where the adapter was made on a model without head.

    Raises:
      InputError: if the model has no such module.
    """
    for prefix in HEADLESS:
        if prefix + module in known:
            return prefix + module
    raise InputError(
        f"{source} adapts the module {module}, which is no projection of this model; "
        f"it has {', '.join(sorted(known)[:4])}, ..."
    )


def shortest_names(wanted: Collection[str], known: Collection[str]) -> list[str]:
    """The shortest names by which PEFT finds the wanted modules and no other.

    PEFT takes each module whose name is one of them, or ends with one after a dot.

    Args:
      wanted: full names of modules.
      known: those of all modules that could be found.

    Returns:
      endings such as "q_proj" or "attn.c_proj" where they are enough, and full names
      for the rest, sorted.
    """
    found: set[str] = set()
    for module in sorted(wanted):
        if _matched(found, module):
            continue
        found.add(_shortest(module, wanted, known))
    return sorted(found)


def _shortest(module: str, wanted: Collection[str], known: Collection[str]) -> str:
    pieces = module.split(".")
    for count in range(1, len(pieces)):
        ending = ".".join(pieces[-count:])
        if all(name in wanted for name in known if _matched((ending,), name)):
            return ending
    return module


def matching(targets: Any, known: Iterable[str]) -> set[str]:
    """The modules that a `target_modules` of any form means.

    Raises:
      InputError: for a text that is no regular expression.
    """
    if not isinstance(targets, str):
        return {name for name in known if _matched(targets or (), name)}
    if targets == ALL_LINEAR:
        return set(known)
    try:
        return {name for name in known if re.fullmatch(targets, name)}
    except re.error as error:
        raise InputError(
            f"target_modules is {targets!r}, which is no regular expression: {error}"
        ) from error


def _matched(endings: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in endings)
