"""Layout of one model on a mesh: each device's shard of each parameter."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.settings.axis_rules import (
    MEMORY_HEADS,
    MEMORY_KEYS,
    ROW_AXES,
    SPLIT_NAMES,
    TENSOR,
    AxisRules,
    axes_of,
)

GROUPS = "key_value_heads"
VOCABULARY = "vocab"
NEVER_GATHERED = (*SPLIT_NAMES, VOCABULARY)
"""Dimensions that are computed in shards, and so never gathered."""


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Layout of a model on a mesh.

    Attributes:
      mesh: the devices.
      rules: mesh axis of each parameter dimension.
      config: the model's config.

    Raises:
      InputError: if the model's heads or columns cannot be divided among the devices.
    """

    mesh: Mesh
    rules: AxisRules
    config: ModelConfig

    def __post_init__(self):
        sizes = (
            ("heads", "heads", self.config.heads),
            ("mlp", "feed-forward columns", self.config.feed_forward_width),
            ("mlp", "columns of a shared expert", self.config.shared_expert_width),
            ("mlp", "columns of layers without experts", self.config.dense_width),
        )
        for name, noun, size in sizes:
            count = self.shard_count(name)
            if size % count:
                raise InputError(
                    f"the model has {size} {noun}, which cannot be divided among "
                    f"{count} devices along {TENSOR!r}; choose a number that divides "
                    f"{size}, or the rule ({name!r}, None)"
                )
        groups, count = self.config.key_value_heads, self.shard_count(GROUPS)
        if groups % count and count % groups:
            raise InputError(
                f"the model has {groups} key/value heads for {count} devices along "
                f"{TENSOR!r}: one of the numbers must divide the other"
            )
        full = self.config.full_key_value_heads
        if full != groups and full % count:
            raise InputError(
                f"the model has {full} key/value heads in layers without a window for "
                f"{count} devices along {TENSOR!r}: choose a number that divides "
                f"{full}"
            )
        for heads, keys in (("heads", GROUPS), (MEMORY_HEADS, MEMORY_KEYS)):
            if self.axes(keys) != self.axes(heads):
                raise InputError(
                    f"AxisRules splits {heads!r} and {keys!r} differently, but each "
                    "head needs its keys: give both the same rule"
                )

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that shard a dimension, in arrays with "embed".

        Axes with one device are left out, because nothing is sharded over them.
        """
        if name in (MEMORY_HEADS, MEMORY_KEYS) and not self._divides_memories:
            return ()
        return self._axes_by_rules(name)

    def _axes_by_rules(self, name: str) -> tuple[str, ...]:
        spec = partition_spec(self.rules, f"a dimension {name!r}", (name, "embed"))
        return self.used_axes(axes_of(spec[0]))

    @functools.cached_property
    def _divides_memories(self) -> bool:
        """Whether devices divide the heads of memories; otherwise each computes all."""
        axes = self._axes_by_rules(MEMORY_HEADS)
        count = math.prod(self.mesh.shape[axis] for axis in axes)
        keys = self.config.recurrent_key_heads
        fits = self.config.recurrent_heads % count == 0
        return fits and (keys % count == 0 or keys == 1)

    @property
    def whole_memories(self) -> str | None:
        """Says that each device computes all heads of memories; None if it does not."""
        if self._divides_memories:
            return None
        axes = self._axes_by_rules(MEMORY_HEADS)
        count = math.prod(self.mesh.shape[axis] for axis in axes)
        heads, keys = self.config.recurrent_heads, self.config.recurrent_key_heads
        fits = keys if keys > 1 else heads
        return (
            f"mesh: each of the {count} devices along {', '.join(axes)} computes all "
            f"{heads} heads of {self.config.recurrence}, with {keys} key heads; a "
            f"number of devices that divides {fits} would divide them"
        )

    def used_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Selects the mesh axes that have more than one device."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def shard_count(self, name: str) -> int:
        """The number of shards of a dimension."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    @property
    def shared_memory_keys(self) -> bool:
        """Whether devices share the key head of memories, which is then replicated."""
        return self.config.recurrent_key_heads % self.shard_count(MEMORY_KEYS) != 0

    @property
    def shared_groups(self) -> bool:
        """Whether devices share key/value heads; these are then replicated."""
        return self.config.key_value_heads % self.shard_count(GROUPS) != 0

    @functools.cached_property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows of a batch are split over."""
        return self.used_axes(ROW_AXES)

    @property
    def row_parts(self) -> int:
        """Number of parts that the rows of a batch are divided into."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of a replicated array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def row_spec(self) -> PartitionSpec:
        """The PartitionSpec of an array with a batch's rows as first dimension."""
        return PartitionSpec(self.row_axes or None)

    def batch_spec(self, batch: Any) -> PartitionSpec:
        """The PartitionSpec of a batch's arrays, with or without micro-batches."""
        return PartitionSpec(*[None] * (batch.tokens.ndim - 2), *self.row_spec)

    def spec(self, path: str, names: Sequence[str]) -> PartitionSpec:
        """Returns the PartitionSpec of a parameter.

        Raises:
          InputError: if the rules would shard a dimension in two ways, though it is
            computed in shards.
        """
        # The same in all parameters that a computation combines: a kernel and its bias.
        whole = [
            name for name in NEVER_GATHERED if name in names and not self.axes(name)
        ]
        if self.shared_groups:
            whole.append(GROUPS)
        if self.shared_memory_keys:
            whole.append(MEMORY_KEYS)
        spec = partition_spec(self.rules, path, names, whole=whole)
        for name, entry in zip(names, spec, strict=True):
            computed = name in NEVER_GATHERED and name not in whole
            if computed and self.used_axes(axes_of(entry)) != self.axes(name):
                here = ", ".join(axes_of(entry)) or "nothing"
                raise InputError(
                    f"{path} {tuple(names)}: AxisRules splits {name!r} over {here} "
                    f"here and over {', '.join(self.axes(name))} next to 'embed', but "
                    "each device needs the same part of it everywhere: change the "
                    "rules of the other dimensions"
                )
        return spec

    def padded_shape(
        self, names: Sequence[str], shape: Sequence[int]
    ) -> tuple[int, ...]:
        """A parameter's shape, with the vocabulary padded to a multiple of shards."""
        count = self.shard_count(VOCABULARY)
        return tuple(
            -(-size // count) * count if name == VOCABULARY else size
            for name, size in zip(names, shape, strict=True)
        )

    def shardings(
        self, axes: Mapping[str, ParameterAxes], abstract: Mapping[str, Any]
    ) -> dict[str, NamedSharding]:
        """The sharding of every parameter, by path.

        Raises:
          InputError: if a dimension cannot be divided.
        """
        shardings = {}
        for path, logical in axes.items():
            spec = self.spec(path, logical.names)
            shape = self.padded_shape(logical.names, abstract[path].shape)
            self._check(path, logical, shape, spec)
            shardings[path] = NamedSharding(self.mesh, spec)
        return shardings

    def _check(
        self, path: str, axes: ParameterAxes, shape: Sequence[int], spec: PartitionSpec
    ) -> None:
        for name, size, entry in zip(axes.names, shape, spec, strict=True):
            split = axes_of(entry)
            count = math.prod(self.mesh.shape[axis] for axis in split)
            if count > 1 and name in SPLIT_NAMES and path.endswith("_order"):
                raise InputError(
                    f"{path}: the inputs of this kernel are quantized in groups that "
                    f"do not follow each other, so {name!r} cannot be divided among "
                    f"{count} devices along {', '.join(split)}: use 'fsdp' instead, "
                    "or set Pretrained.parameter_dtype to 'bfloat16'"
                )
            if size % count:
                # Those that share a scale stay together.
                noun = "groups" if path.endswith("_scale") else "numbers"
                raise InputError(
                    f"{path} has {size} {noun} along {name!r}, which cannot be "
                    f"divided among {count} devices along {', '.join(split)}; choose "
                    f"a number that divides {size}, or the rule ({name!r}, None)"
                )

    def gradient_axes(self, path: str, axes: ParameterAxes) -> tuple[str, ...]:
        """Returns the mesh axes over which devices sum their gradients of a parameter.

        These are the row axes, and the axes along which each device uses a replicated
        parameter for its own shard of a computation. Axes over which the parameter
        itself is sharded are left out: its gather sums over them.
        """
        spec = self.spec(path, axes.names)
        sharded = {axis for entry in spec for axis in axes_of(entry)}
        over = (*self.row_axes, *self.partial_axes(axes))
        return tuple(axis for axis in over if axis not in sharded)

    def partial_axes(self, axes: ParameterAxes) -> tuple[str, ...]:
        """Returns the mesh axes along which a parameter's gradients are partial.

        There each device uses the parameter for its own shard of a computation. Along
        all other axes, except the row axes, every device has the same gradient.
        """
        if axes.partial_over in SPLIT_NAMES:
            return self.axes(axes.partial_over)
        shared = {GROUPS: self.shared_groups, MEMORY_KEYS: self.shared_memory_keys}
        for name in axes.names:
            if shared.get(name):
                return self.axes(name)
        return ()


def partition_spec(
    rules: AxisRules, path: str, names: Sequence[str], *, whole: Sequence[str] = ()
) -> PartitionSpec:
    """Returns the PartitionSpec of an array.

    Args:
      rules: mesh axis of each dimension.
      path: path of the parameter, for the error.
      names: names of its dimensions.
      whole: names that are never sharded, whatever the rules say.

    Raises:
      InputError: if two of its dimensions would be sharded over one mesh axis, and no
        later rule applies to the second.
    """
    chosen: dict[str, tuple[str, ...]] = {name: () for name in whole}
    refused: dict[str, tuple[str, ...]] = {}
    for name, axes in rules.table:
        if name not in names or name in chosen:
            continue
        taken = {axis for used in chosen.values() for axis in used}
        if taken.intersection(axes):
            refused.setdefault(name, axes)
        else:
            chosen[name] = axes
    for name, axes in refused.items():
        if name not in chosen:
            raise InputError(
                f"{path} {tuple(names)} cannot be split: the rule for {name!r} "
                f"needs {', '.join(axes)}, which another of its dimensions uses; "
                f"add the rule ({name!r}, None), or change AxisRules"
            )
    return PartitionSpec(*(_entry(chosen.get(name, ())) for name in names))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None
