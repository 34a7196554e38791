"""Map our projections to transformers' modules, and to PEFT's target settings.

The names come from the tables that restore the model (`families.hf_folder`). Some
families fuse projections, e.g. query, key and value in GPT-2.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prompt_tuning.checkpoints.special_layouts import EveryOther
from prompt_tuning.checkpoints.stored_tensors import FusedPart, transpose
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.layer_kinds import ATTENTIONS, MIXERS, SHARING, attention_sizes
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.families import FAMILIES, hf_folder

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
# Transformers' parameter for each projection of the experts, and its part in it.
_PARAMETERS = {
    "gate": ("gate_up_proj", 0),
    "up": ("gate_up_proj", 1),
    "down": ("down_proj", None),
}
HEADLESS = ("", *sorted({family.base_prefix for family in FAMILIES.values()} - {""}))


@dataclasses.dataclass(frozen=True)
class Projection:
    """One projection of a stack.

    Attributes:
      path: our path, e.g. "decoder/layers/self_attention/query".
      modules: name of each layer's module in transformers.
      part: columns of the projection within those modules.
      size_in: input size.
      size_out: output size.
      experts: number of experts that each have such a projection; 0 for none.
    """

    path: str
    modules: tuple[str, ...]
    part: FusedPart
    size_in: int
    size_out: int
    experts: int = 0

    @property
    def in_first(self) -> bool:
        """Whether a module's weight is stored as `[in, out]` (GPT-2's `Conv1D`)."""
        return self.part.in_first

    @property
    def module_out(self) -> int:
        """Output size of the module with all of its parts."""
        part = self.part
        return self.size_out // part.shares[part.index] * sum(part.shares)

    @property
    def scales_input(self) -> bool:
        """Whether IA3 scales the input (Liu et al. 2022, section 3.3)."""
        return self.path.endswith(("/mlp/down", "/dense_mlp/down", "/shared/down"))


def projections(
    config: ModelConfig, names: Collection[str] = ()
) -> dict[str, Projection]:
    """Returns the projections of a model, by our path.

    Args:
      config: config of the model.
      names: names of a checkpoint's arrays, to name modules as the checkpoint does;
        without them, modules are named as in a model with its head.
    """
    sizes = _sizes(config)
    by_path = {}
    for path, recipe in hf_folder.find_recipes(config, names).items():
        projection = path.removesuffix("/kernel")
        kind = "/".join(projection.split("/")[-2:])
        if projection == path or kind not in sizes:
            continue
        transform = recipe.transform
        whole = FusedPart(in_first=transform is not transpose)
        part = transform if isinstance(transform, FusedPart) else whole
        by_path[projection] = Projection(
            projection,
            tuple(name.removesuffix(".weight") for name in recipe.sources),
            part,
            *sizes[kind],
        )
    return by_path


def _sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the input and output size of each kind of projection."""
    width, inner = config.width, config.feed_forward_width
    shared, dense = config.shared_expert_width, config.dense_width
    heads = config.recurrent_heads
    values = heads * config.recurrent_width
    keys = config.recurrent_key_heads * config.recurrent_key_width
    memory = {
        **dict.fromkeys(("query", "key"), (width, keys)),
        **dict.fromkeys(("strength", "decay", "step"), (width, heads)),
        **dict.fromkeys(("value", "gate"), (width, values)),
        "output": (values, width),
    }
    keys, rank = config.recurrent_key_width, config.step_rank
    scan = {
        **{name: memory[name] for name in ("value", "gate", "output")},
        **dict.fromkeys(("query", "key"), (values, keys)),
        "step_down": (values, rank),
    }
    kinds = (*ATTENTIONS, *SHARING.values(), "cross_attention")
    attention = {kind: _attention_sizes(config, kind) for kind in kinds}
    return {
        **{
            f"{layer}/{name}": size
            for layer, sizes in attention.items()
            for name, size in sizes.items()
        },
        **{f"shared/{name}": (width, shared) for name in ("gate", "up")},
        "shared/down": (shared, width),
        **{
            f"{mixer}/{name}": size
            for mixer in MIXERS
            for name, size in (scan if mixer == "mamba" else memory).items()
        },
        "layer_input/gate": (width, config.layer_input_width),
        "layer_input/projection": (config.layer_input_width, width),
        "short_convolution/input": (width, 3 * width),
        "short_convolution/output": (width, width),
        "mlp/shared_gate": (width, 1),
        **{f"dense_mlp/{name}": (width, dense) for name in ("gate", "up")},
        "dense_mlp/down": (dense, width),
        "mlp/gate": (width, inner),
        "mlp/up": (width, inner),
        "mlp/down": (inner, width),
    }


def _attention_sizes(config: ModelConfig, kind: str) -> dict[str, tuple[int, int]]:
    """Returns the input and output size of each projection of attention."""
    width, (head_width, groups) = config.width, attention_sizes(config, kind)
    queries, keys = config.heads * head_width, groups * head_width
    sizes = {
        "query": (width, queries),
        "query_gate": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
    }
    if rank := config.key_value_rank:
        unrotated = config.head_width - config.rotated_width
        attended = config.heads * config.width_of_values
        sizes |= {
            "query_down": (width, config.query_rank),
            "query": (config.query_rank or width, queries),
            "key_value_down": (width, rank + config.rotated_width),
            "key": (rank, config.heads * unrotated),
            "value": (rank, attended),
            "out": (attended, width),
        }
    return sizes


def expert_projections(config: ModelConfig) -> dict[str, Projection]:
    """Returns the projections of experts, and their routers, by our path.

    Transformers holds those of all experts as two parameters of a module `experts`, and
    most routers as a parameter `weight`; PEFT's `target_parameters` uses their names.
    """
    family = hf_folder.find_family(config)
    inner, width, found = config.feed_forward_width, config.width, {}
    for path, sources in _router_sources(config).items():
        modules = tuple(_renamed(x, family.expert_block) for x in sources)
        found[path] = Projection(path, modules, FusedPart(), width, config.experts)
    for path, recipe in hf_folder.find_recipes(config).items():
        block, _, kind = path.partition("/expert_")
        if kind not in _PARAMETERS:
            continue
        name, index = _PARAMETERS[kind]
        if kind == "up" and not config.gated:
            name, index = "up_proj", None
        groups = inner if isinstance(recipe.transform, EveryOther) else 1
        part = FusedPart() if index is None else FusedPart(index, (1, 1), groups)
        sources = recipe.sources[:: recipe.experts or 1]
        sizes = (inner, width) if kind == "down" else (width, inner)
        modules = tuple(
            f"{_experts_of(x, family.expert_block)}.{name}" for x in sources
        )
        found[f"{block}/experts/{kind}"] = Projection(
            f"{block}/experts/{kind}", modules, part, *sizes, experts=config.experts
        )
    return found


class ExpertPlace(NamedTuple):
    """The projection kernel that a single expert's module has."""

    path: str
    layer: int
    expert: int


def single_experts(config: ModelConfig) -> dict[str, ExpertPlace]:
    """Returns the modules of single experts, which transformers 4 had."""
    places = {}
    for path, recipe in hf_folder.find_recipes(config).items():
        block, _, kind = path.partition("/expert_")
        if kind in _PARAMETERS and recipe.experts is not None:
            for number, source in enumerate(recipe.sources):
                place = divmod(number, recipe.experts)
                module = source.removesuffix(".weight")
                places[module] = ExpertPlace(f"{block}/experts/{kind}", *place)
    return places


def routers(config: ModelConfig) -> dict[str, str]:
    """Returns the weight of each router, by the names that its module has had.

    In transformers 4, and in some families still, routers are linear layers, which
    PEFT adapts like others.
    """
    block, weights = hf_folder.find_family(config).expert_block, {}
    for sources in _router_sources(config).values():
        for source in sources:
            weight = _renamed(source, block)
            for name in (source, weight):
                weights[name.removesuffix(".weight")] = weight
    return weights


def _router_sources(config: ModelConfig) -> dict[str, Sequence[str]]:
    """Returns the stored weights of routers, one for each layer, by our path."""
    return {
        path.removesuffix("/kernel"): recipe.sources
        for path, recipe in hf_folder.find_recipes(config).items()
        if path.endswith("/router/kernel")
    }


def _renamed(source: str, block: str | None) -> str:
    """Returns a stored name with the name of its block in transformers.

    `source` is e.g. `model.layers.0.block_sparse_moe.gate.weight`; `block` is "mlp", or
    None if the name is the same.
    """
    parts = source.split(".")
    after_layer = parts.index("layers") + 2
    return ".".join(
        [*parts[:after_layer], block or parts[after_layer], *parts[after_layer + 1 :]]
    )


def _experts_of(source: str, block: str | None) -> str:
    """Returns the module of all experts, given the name of one of its stored tensors.

    `source` is e.g. `model.layers.0.mlp.experts.3.up_proj.weight`; for `block` see
    `_renamed`.
    """
    parts = _renamed(source, block).split(".")
    return ".".join([*parts[: parts.index("layers") + 3], "experts"])


def by_module(known: Mapping[str, Projection]) -> dict[str, list[Projection]]:
    """Returns the projections within each module, in the order of their parts."""
    by_name: dict[str, list[Projection]] = {}
    for projection in known.values():
        for module in projection.modules:
            by_name.setdefault(module, []).append(projection)
    return {
        module: sorted(parts, key=lambda projection: projection.part.index)
        for module, parts in by_name.items()
    }


def unread_modules(config: ModelConfig) -> set[str]:
    """Returns modules of transformers' model that ours lacks."""
    patterns = hf_folder.find_family(config).unread_modules
    return {name.format(i) for name in patterns for i in range(config.layers)}


def find_name(
    module: str, known: Collection[str], aliases: Sequence[str] = ()
) -> str | None:
    """Finds the name of a module in the model that transformers loads.

    Args:
      module: name in an adapter's file.
      known: names in the model.
      aliases: interchangeable prefixes of different versions of the model.

    Returns:
      the name, completed if the adapter's model lacked the head; None if the model has
      no such module.
    """
    stems = [module.removeprefix(alias) for alias in aliases]
    for stem in dict.fromkeys((module, *stems)):
        for prefix in (*HEADLESS, *aliases):
            if prefix + stem in known:
                return prefix + stem
    return None


def full_name(
    module: str, known: Collection[str], source: str, aliases: Sequence[str] = ()
) -> str:
    """Completes the name of a projection's module; see `find_name`.

    Raises:
      InputError: if the model has no such module.
    """
    name = find_name(module, known, aliases)
    if name is not None:
        return name
    raise InputError(
        f"{source} adapts the module {shortened(module)}, which is not a projection "
        f"of this model; it has {', '.join(sorted(known)[:4])}, ..."
    )


def shortest_names(wanted: Collection[str], known: Collection[str]) -> list[str]:
    """Returns the shortest names that select exactly the wanted modules in PEFT.

    PEFT adapts a module if its name is one of them, or ends with one after a dot.

    Returns:
      suffixes such as "q_proj" or "attn.c_proj" where unambiguous, and full names
      otherwise, sorted.
    """
    names: set[str] = set()
    for module in sorted(wanted):
        if _is_matched(names, module):
            continue
        names.add(_shortest(module, wanted, known))
    return sorted(names)


def _shortest(module: str, wanted: Collection[str], known: Collection[str]) -> str:
    parts = module.split(".")
    for count in range(1, len(parts)):
        suffix = ".".join(parts[-count:])
        if all(name in wanted for name in known if _is_matched((suffix,), name)):
            return suffix
    return module


def match_targets(targets: Any, known: Iterable[str]) -> set[str]:
    """Returns the modules that `target_modules` of any form selects.

    Raises:
      InputError: if it is a text but not an RE2 expression.
    """
    if not isinstance(targets, str):
        return {name for name in known if _is_matched(targets or (), name)}
    if targets == ALL_LINEAR:
        return set(known)
    pattern = compile_pattern(targets, "target_modules")
    return {name for name in known if pattern.matches(name)}


def _is_matched(suffixes: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in suffixes)
