"""Decides where every parameter comes from, before any is read.

A parameter is either restored from named arrays of the checkpoint, or fresh because an
entry of the assignment map says so. Arrays that no parameter reads are reported as
ignored. Everything else is an error.
"""

import dataclasses
import difflib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.typing import DTypeLike

from prompt_tuning.checkpoints.kernel_readers import published_readers, readers
from prompt_tuning.checkpoints.quantized.codes import WidenedTensor
from prompt_tuning.checkpoints.stored_tensors import (
    PartReader,
    Recipe,
    StoredTensor,
    check_recipe,
)
from prompt_tuning.core.array_slices import whole
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.core.quantization.stores import (
    INT4,
    INT8,
    NF4,
    PARTS,
    UNQUANTIZED,
    Store,
    describes_kernel,
    is_packed,
    is_quantized,
    part_path,
    weight_shape,
)
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.settings.pretrained import TUNED_ARE_FRESH, AssignmentMap

FreshBy = Mapping[str, str] | Callable[[str], str]

TUNED_PATHS = (
    "encoder/prompt/prompt",
    "decoder/prompt/prompt",
    "decoder/layers/self_attention/query/adapters/lora/a",
)
"""Paths of tuned parameters, which a map may name although a model has none."""
MAXIMUM_LISTED = 10
MAXIMUM_COMPARED, MAXIMUM_COMPARED_NAME = 1000, 200
"""Maximum number and length of the names among which the nearest are searched."""


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """Source of every parameter of a model, and use of every array of a checkpoint.

    Attributes:
      origin: file or folder of the checkpoint.
      abstract: shape and dtype of every parameter.
      restored: recipes of the parameters that are read.
      fresh: descriptions of the initializers of the other parameters.
      stored: stored tensors of the checkpoint.
      stores: stores of parameters that are kept as published.
    """

    origin: str
    abstract: Mapping[str, jax.ShapeDtypeStruct]
    restored: Mapping[str, Recipe]
    fresh: Mapping[str, str]
    stored: Mapping[str, StoredTensor]
    stores: Mapping[str, Store] = dataclasses.field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of stored arrays that no parameter reads."""
        used = {name for recipe in self.restored.values() for name in recipe.sources}
        return tuple(name for name in self.stored if name not in used)

    @property
    def quantized(self) -> tuple[str, ...]:
        """Paths of the quantized kernels, restored or fresh."""
        return _quantized(self.abstract)

    @property
    def derived(self) -> frozenset[str]:
        """Paths of scales and codebooks, which are read with their kernels."""
        return frozenset(_derived(self.abstract))

    def readers(
        self, dtype: DTypeLike | None = None
    ) -> Iterator[tuple[str, PartReader]]:
        """Yields a reader for each restored parameter, which reads blocks of it.

        Kernels are quantized while they are read, unless they are kept as published;
        the readers of a kernel's scales etc. follow the kernel's. `dtype` is for
        unquantized parameters; None keeps each abstract leaf's.
        """
        derived = self.derived
        for path, recipe in self.restored.items():
            if path in derived:
                continue
            store = self.stores.get(path)
            if store is not None and store.quantized:
                yield from published_readers(
                    path, self.abstract, recipe, self.stored, store
                )
            else:
                yield from readers(path, self.abstract, recipe, self.stored, dtype)

    def read(self, dtype: DTypeLike | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the restored parameters one by one."""
        for path, read in self.readers(dtype):
            yield path, read([whole(self.abstract[path].shape)])[0]

    def restore(self, dtype: DTypeLike | None = None) -> dict[str, np.ndarray]:
        """Reads all restored parameters, by path."""
        return dict(self.read(dtype))

    def report(self) -> str:
        """Returns a table of counts, followed by the fresh and the ignored arrays."""
        ignored = {name: self.stored[name] for name in self.ignored}
        lines = [
            f"checkpoint {self.origin}",
            f"{'':8} {'arrays':>8} {'parameters':>16} {'bytes':>18}",
            _count_row("restored", [self.abstract[path] for path in self.restored])
            + f"   from {len(self.stored) - len(ignored)} of {len(self.stored)} stored",
            *self._quantized_rows(),
            _count_row("fresh", [self.abstract[path] for path in self.fresh]),
            _count_row("ignored", list(ignored.values())),
        ]
        if self.fresh:
            lines += ["fresh, initialized by:"]
            lines += [
                f"  {path} {tuple(self.abstract[path].shape)}: {by}"
                for path, by in self.fresh.items()
            ]
        if ignored:
            lines += ["ignored, stored but read by no parameter:"]
            lines += _listed(
                [
                    f"{name} {tensor.shape} {tensor.dtype.name}, in {tensor.source}"
                    for name, tensor in ignored.items()
                ]
            )
        return "\n".join(lines)

    def _quantized_rows(self) -> list[str]:
        by_kind: dict[str, list[str]] = {}
        for path in self.quantized:
            by_kind.setdefault(self._kind(path), []).append(path)
        rows = []
        for kind, paths in by_kind.items():
            row = _count_row(f"  {kind}", [self.abstract[path] for path in paths])
            published = sorted({str(self.stores[p]) for p in paths if p in self.stores})
            how = "two weights in each, with float32 scales"
            if not is_packed(self.abstract[paths[0]]):
                how = "quantized with one float32 scale per channel"
            how = f"as published: {' and '.join(published)}" if published else how
            rows.append(f"{row}   of these, {how}")
        return rows + self._widened_rows()

    def _kind(self, path: str) -> str:
        """Returns the name of a quantized kernel's store."""
        if path in self.stores:
            return self.stores[path].name
        if not is_packed(self.abstract[path]):
            return INT8
        return NF4 if part_path(path, "codebook") in self.abstract else INT4

    def _widened_rows(self) -> list[str]:
        """Counts quantized tensors that are stored as floats."""
        quantized = set(self.quantized)
        paths = [
            path
            for path, recipe in self.restored.items()
            if path not in self.derived and path not in quantized
            if any(isinstance(self.stored[n], WidenedTensor) for n in recipe.sources)
        ]
        if not paths:
            return []
        row = _count_row("  widened", [self.abstract[path] for path in paths])
        return [f"{row}   of these, published in fewer bits: {', '.join(paths[:3])}"]


def plan_restore(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    recipes: Mapping[str, Recipe],
    stored: Mapping[str, StoredTensor],
    *,
    assignment_map: AssignmentMap = TUNED_ARE_FRESH,
    fallback_to_scratch: bool = True,
    fresh_by: FreshBy | None = None,
    stores: Mapping[str, Store] | None = None,
) -> RestorePlan:
    r"""Decides the source of every parameter and checks every shape.

    The assignment map works like T5X's (`t5x.state_utils.apply_assignment_map`). The
    first pattern that matches the whole path of a parameter determines its source: None
    makes it fresh, and a string names another of our paths, or a stored array to read
    unchanged; `\1` is the first group of the pattern. A parameter without a match is
    read by its own recipe. The scales of a quantized kernel are computed from its
    weights, so they follow its source, whatever the map says.

    Args:
      abstract: shape and dtype of every parameter, by path.
      recipes: recipes of the family, by path.
      stored: stored tensors of the checkpoint, by name.
      assignment_map: (pattern, source) pairs; each pattern must match a parameter,
        except for patterns in `TUNED_ARE_FRESH`, and patterns for prompts and adapters
        in a model without them, e.g. a run's baseline.
      fallback_to_scratch: whether any parameter may be fresh.
      fresh_by: descriptions of the initializers of fresh parameters, for the report.
      stores: stores of parameters that are kept as published, by path.

    Raises:
      InputError: for a parameter without a source, a fresh parameter although none may
        be, a wrong shape, a pattern that is invalid or matches nothing, or another
        source for a kernel that is kept as published.
    """
    if not stored:
        raise InputError("the checkpoint contains no arrays")
    derived = _derived(abstract)
    assignable = [path for path in abstract if path not in derived]
    _check_patterns(assignment_map, assignable)
    origin = os.path.commonpath([tensor.source for tensor in stored.values()])
    sources = {path: _assigned(path, assignment_map) for path in assignable}
    restored = {
        path: recipes.get(source, Recipe((source,)))
        for path, source in sources.items()
        if source is not None
    }
    _check_sources(restored, stored, origin)
    _check_stores(stores or {}, restored, recipes)
    for path, recipe in restored.items():
        check_recipe(path, weight_shape(path, abstract[path]), recipe, stored)
    restored |= {
        derived_path: restored[path]
        for derived_path, path in derived.items()
        if path in restored
    }
    fresh = {
        path: _description(path, fresh_by) for path in abstract if path not in restored
    }
    if not fallback_to_scratch:
        _refuse_fresh(list(fresh))
    return RestorePlan(origin, abstract, restored, fresh, stored, stores or {})


def _check_stores(
    stores: Mapping[str, Store],
    restored: Mapping[str, Recipe],
    recipes: Mapping[str, Recipe],
) -> None:
    """Checks that kernels in published codes are read by their own recipes."""
    for path, store in stores.items():
        if store.quantized and restored.get(path, recipes[path]) != recipes[path]:
            raise InputError(
                f"the assignment map reads {path} from another source, but it is held "
                f"as published, in {store}: give "
                f"{how_to_set('Pretrained.parameter_dtype', UNQUANTIZED)}"
            )


def _quantized(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[str, ...]:
    return tuple(
        path
        for path, leaf in abstract.items()
        if is_quantized(leaf) and not describes_kernel(path)
    )


def _derived(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, str]:
    """Returns the kernel of each array that is computed from a kernel's weights."""
    return {
        derived_path: path
        for path in _quantized(abstract)
        for part in PARTS
        if (derived_path := part_path(path, part)) in abstract
    }


def _refuse_fresh(fresh: list[str]) -> None:
    if fresh:
        raise InputError(
            "fallback_to_scratch is False, but the assignment map gives these no "
            "source:\n" + "\n".join(_listed(fresh))
        )


def _check_patterns(assignment_map: AssignmentMap, paths: Sequence[str]) -> None:
    is_tuned = any(_assigned(path, TUNED_ARE_FRESH) is None for path in paths)
    known = paths if is_tuned else [*paths, *TUNED_PATHS]
    for entry in assignment_map:
        pattern = compile_pattern(entry[0], "the assignment map")
        if entry in TUNED_ARE_FRESH or any(map(pattern.matches, known)):
            continue
        raise InputError(
            f"the assignment map's pattern {shown(entry[0])} matches no complete path "
            f"of a parameter; nearest: {_nearest(entry[0], paths)}"
        )


def _assigned(path: str, assignment_map: AssignmentMap) -> str | None:
    """Returns the source of a parameter; None if it is fresh."""
    for pattern, source in assignment_map:
        compiled = compile_pattern(pattern, "the assignment map")
        if compiled.matches(path):
            try:
                return None if source is None else compiled.fill(path, source)
            except (IndexError, ValueError) as error:
                raise InputError(
                    f"the assignment map's source {shown(source)} does not fit its "
                    f"pattern {shown(pattern)}: {error}"
                ) from error
    return path


def _description(path: str, fresh_by: FreshBy | None) -> str:
    default = "its own initializer"
    if fresh_by is None:
        return default
    if isinstance(fresh_by, Mapping):
        return fresh_by.get(path, default)
    return fresh_by(path)


def _check_sources(
    restored: Mapping[str, Recipe], stored: Mapping[str, StoredTensor], origin: str
) -> None:
    missing = [
        (path, name)
        for path, recipe in restored.items()
        for name in recipe.sources
        if name not in stored
    ]

    def describe(needed: tuple[str, str]) -> str:
        path, name = needed
        return f"{path} needs {name}; nearest: {_nearest(name, stored)}"

    if missing:
        raise InputError(
            f"{origin} has {len(stored)} arrays, but lacks {len(missing)} more:\n"
            + "\n".join(_listed(missing, describe))
            + "\nTo initialize a parameter instead, add to the assignment map an entry "
            "(pattern of its path, None)."
        )


def _nearest(name: str, candidates: Iterable[str]) -> str:
    short = (
        candidate for candidate in candidates if len(candidate) <= MAXIMUM_COMPARED_NAME
    )
    compared = itertools.islice(short, MAXIMUM_COMPARED)
    close = difflib.get_close_matches(name, compared, n=3, cutoff=0.0)
    return ", ".join(close)


def _listed(rows: Sequence, describe: Callable[..., str] = str) -> list[str]:
    """Returns the first rows, indented, and the number of remaining ones."""
    shown = [f"  {describe(row)}" for row in rows[:MAXIMUM_LISTED]]
    more = len(rows) - MAXIMUM_LISTED
    return [*shown, f"  and {more} more"] if more > 0 else shown


def _count_row(name: str, arrays: Sequence[jax.ShapeDtypeStruct | StoredTensor]) -> str:
    sizes = [math.prod(array.shape) for array in arrays]
    total = sum(
        size * np.dtype(array.dtype).itemsize
        for size, array in zip(sizes, arrays, strict=True)
    )
    return f"{name:8} {len(arrays):>8,} {sum(sizes):>16,} {total:>18,}"
