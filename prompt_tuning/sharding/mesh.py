"""The mesh: how many devices stand along each axis."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.sharding.axis_rules import MESH_AXES, AxisRules
from prompt_tuning.sharding.mesh_layout import MeshLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis; of at most one axis -1, for all that are left.

    Attributes:
      data: devices among which the rows of a batch are split, each group of them with
        all parameters.
      fsdp: devices among which rows are split, and parameters too, which are put
        together a block at a time.
      tensor: devices among which heads, feed-forward layers and the vocabulary are
        split.
      rules: which mesh axis each dimension of a parameter goes to; Megatron's if None.

    Raises:
      InputError: if a number is neither -1 nor at least 1, or two are -1.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    rules: AxisRules | None = None

    def __post_init__(self):
        check_fields(self)
        for name, count in self.sizes.items():
            if count < 1 and count != -1:
                raise InputError(
                    f"MeshShape.{name} is {count}, expected a number of devices, or -1 "
                    "for all that are left"
                )
        free = [name for name, count in self.sizes.items() if count == -1]
        if len(free) > 1:
            raise InputError(
                f"MeshShape has -1 for {' and '.join(free)}; let one of them be a "
                "number of devices"
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis, in the order of the mesh."""
        return {name: getattr(self, name) for name in MESH_AXES}

    def layout(self, config: ModelConfig) -> MeshLayout:
        """A model's place on the mesh of all devices.

        Raises:
          InputError: if the devices cannot be arranged so, or the model not be divided.
        """
        return MeshLayout(self.build(), self.rules or AxisRules(), config)

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of some devices, all of every process if None.

        Raises:
          InputError: if the devices cannot be arranged so.
        """
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes
        fixed = math.prod(count for count in sizes.values() if count != -1)
        asked = " x ".join(f"{name} {count}" for name, count in sizes.items())
        free = -1 in sizes.values()
        if free and len(devices) % fixed:
            raise InputError(
                f"the number of devices, {len(devices)}, is no multiple of {fixed}, so "
                f"they cannot be arranged as {asked}: set MeshShape's axes to numbers "
                "that divide it, or --gin.Run.mesh=None for one device"
            )
        if not free and fixed != len(devices):
            raise InputError(
                f"{asked} takes {fixed} devices, but there are {len(devices)}; set one "
                "of MeshShape's axes to -1, or start as many"
            )
        shape = [len(devices) // fixed if x == -1 else x for x in sizes.values()]
        return jax.make_mesh(
            tuple(shape),
            MESH_AXES,
            axis_types=(AxisType.Auto,) * len(shape),
            devices=devices,
        )
