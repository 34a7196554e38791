"""How one model lies on a mesh: the part of every parameter that each device has."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.sharding.axis_rules import (
    ROW_AXES,
    SPLIT_NAMES,
    TENSOR,
    AxisRules,
    axes_of,
)

GROUPS = "key_value_heads"
VOCABULARY = "vocab"
NEVER_GATHERED = (*SPLIT_NAMES, VOCABULARY)


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """A model's place on a mesh.

    Attributes:
      mesh: the devices.
      rules: which mesh axis each dimension goes to.
      config: of the model.

    Raises:
      InputError: if the model's heads or layers cannot be divided so.
    """

    mesh: Mesh
    rules: AxisRules
    config: ModelConfig

    def __post_init__(self):
        sizes = {
            "heads": ("heads", self.config.heads),
            "mlp": ("feed-forward columns", self.config.feed_forward_width),
        }
        for name, (what, size) in sizes.items():
            count = self.shard_count(name)
            if size % count:
                raise InputError(
                    f"the model has {size} {what}, which cannot be divided among "
                    f"{count} devices along {TENSOR!r}; choose a number that divides "
                    f"{size}, or the rule ({name!r}, None)"
                )
        groups, count = self.config.key_value_heads, self.shard_count(GROUPS)
        if groups % count and count % groups:
            raise InputError(
                f"the model has {groups} key/value heads for {count} devices along "
                f"{TENSOR!r}: one of the numbers must divide the other"
            )
        if self.axes(GROUPS) != self.axes("heads"):
            raise InputError(
                "AxisRules splits 'heads' and 'key_value_heads' differently, but each "
                "head needs its keys: give both the same rule"
            )

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that a dimension is split over, beside the model's width.

        Axes of one device are left out: nothing is split over them.
        """
        spec = self.rules.spec(f"a dimension {name!r}", (name, "embed"))
        return self.used_axes(axes_of(spec[0]))

    def used_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of some mesh axes that have more than one device."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def shard_count(self, name: str) -> int:
        """Among how many devices a dimension is divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    @property
    def shared_groups(self) -> bool:
        """Whether several devices share a key/value head, and all have all of them."""
        return self.config.key_value_heads % self.shard_count(GROUPS) != 0

    @functools.cached_property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows of a batch are split over."""
        return self.used_axes(ROW_AXES)

    @property
    def row_parts(self) -> int:
        """Among how many devices the rows of a batch are divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    def round_up_rows(self, rows: int) -> int:
        """The next number of rows that can be divided among the devices."""
        return -(-rows // self.row_parts) * self.row_parts

    @property
    def replicated(self) -> NamedSharding:
        """That of an array that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def row_spec(self) -> PartitionSpec:
        """How an array is split that has a batch's rows first."""
        return PartitionSpec(self.row_axes or None)

    def batch_spec(self, batch: Any) -> PartitionSpec:
        """How a batch's arrays are split, with or without axes before the rows."""
        return PartitionSpec(*[None] * (batch.tokens.ndim - 2), *self.row_spec)

    def spec(self, path: str, names: Sequence[str]) -> PartitionSpec:
        """How a parameter is split.

        Args:
          path: of the parameter.
          names: of its dimensions.

        Raises:
          InputError: if the rules split what devices compute in parts in two ways.
        """
        # Alike in all parameters, such as a kernel and its bias.
        whole = [
            name for name in NEVER_GATHERED if name in names and not self.axes(name)
        ]
        if self.shared_groups:
            whole.append(GROUPS)
        spec = self.rules.spec(path, names, whole=whole)
        for name, entry in zip(names, spec, strict=True):
            computed = name in NEVER_GATHERED and name not in whole
            if computed and self.used_axes(axes_of(entry)) != self.axes(name):
                here = ", ".join(axes_of(entry)) or "nothing"
                raise InputError(
                    f"{path} {tuple(names)}: AxisRules splits {name!r} over {here} "
                    f"here and over {', '.join(self.axes(name))} beside 'embed', but "
                    "each device needs one part of it everywhere: change the rules of "
                    "the other dimensions"
                )
        return spec

    def padded_shape(
        self, names: Sequence[str], shape: Sequence[int]
    ) -> tuple[int, ...]:
        """A parameter's shape with a vocabulary that can be divided."""
        count = self.shard_count(VOCABULARY)
        return tuple(
            -(-size // count) * count if name == VOCABULARY else size
            for name, size in zip(names, shape, strict=True)
        )

    def shardings(
        self, axes: Mapping[str, ParameterAxes], abstract: Mapping[str, Any]
    ) -> dict[str, NamedSharding]:
        """The sharding of every parameter, by path.

        Args:
          axes: the parameters' dimensions, by path.
          abstract: their shapes.

        Raises:
          InputError: if a dimension cannot be divided.
        """
        found = {}
        for path, own in axes.items():
            spec = self.spec(path, own.names)
            shape = self.padded_shape(own.names, abstract[path].shape)
            self._check(path, own, shape, spec)
            found[path] = NamedSharding(self.mesh, spec)
        return found

    def _check(
        self, path: str, axes: ParameterAxes, shape: Sequence[int], spec: PartitionSpec
    ) -> None:
        for name, size, entry in zip(axes.names, shape, spec, strict=True):
            split = axes_of(entry)
            count = math.prod(self.mesh.shape[axis] for axis in split)
            if size % count:
                raise InputError(
                    f"{path} has {size} numbers along {name!r}, which cannot be "
                    f"divided among {count} devices along {', '.join(split)}; choose "
                    f"a number that divides {size}, or the rule ({name!r}, None)"
                )

    def gradient_axes(self, path: str, axes: ParameterAxes) -> tuple[str, ...]:
        """The mesh axes over which the devices' gradients of a parameter are added up.

        Over those of the rows, but where the parameter is split itself; and where it
        is whole, but each device uses it for its own part of something.
        """
        spec = self.spec(path, axes.names)
        own = {axis for entry in spec for axis in axes_of(entry)}
        over = (*self.row_axes, *self.partial_axes(axes))
        return tuple(axis for axis in over if axis not in own)

    def partial_axes(self, axes: ParameterAxes) -> tuple[str, ...]:
        """The mesh axes along which each device uses a parameter for its own part.

        Each then has the gradient of its part; along the others that are not of rows,
        every device has the same gradient.
        """
        if axes.partial_over in SPLIT_NAMES:
            return self.axes(axes.partial_over)
        if self.shared_groups and GROUPS in axes.names:
            return self.axes(GROUPS)
        return ()
