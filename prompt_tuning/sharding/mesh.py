"""Meshes of devices, and layouts of models on them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.settings.axis_rules import AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.mesh_layout import MeshLayout


def mesh_layout(shape: MeshShape, config: ModelConfig) -> MeshLayout:
    """Lays a model out on the mesh of all devices.

    Raises:
      InputError: if the devices do not fit the mesh, or the model cannot be divided.
    """
    return MeshLayout(build_mesh(shape), shape.rules or AxisRules(), config)


def build_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Builds a mesh of some devices; by default of all devices of all processes.

    Raises:
      InputError: if the number of devices does not fit the mesh.
    """
    devices = jax.devices() if devices is None else devices
    sizes = shape.sizes
    fixed = math.prod(count for count in sizes.values() if count != -1)
    description = " x ".join(f"{name} {count}" for name, count in sizes.items())
    free = -1 in sizes.values()
    if free and len(devices) % fixed:
        raise InputError(
            f"the number of devices, {len(devices)}, is not a multiple of {fixed}, "
            f"so they cannot be arranged as {description}: set MeshShape's axes to "
            f"numbers that divide it, or {how_to_set('Run.mesh', None)} for one device"
        )
    if not free and fixed != len(devices):
        raise InputError(
            f"{description} takes {fixed} devices, but there are {len(devices)}; "
            f"set one of MeshShape's axes to -1, or provide {fixed} devices"
        )
    counts = [len(devices) // fixed if x == -1 else x for x in sizes.values()]
    return jax.make_mesh(
        tuple(counts),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(counts),
        devices=devices,
    )
