"""Frozen weights kept in pinned host memory and copied to the device block by block.

Models need no setting for this: an array's type records its memory space, even while
tracing, and arrays on the device are left alone. The scan over blocks copies one
block's slice. Like weights gathered from other devices it is rematerialized: the
backward pass copies it again instead of storing it.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array

from prompt_tuning.core.block_arrays import Blocks

HOST = jax.memory.Space.Host
PINNED = "pinned_host"


def any_on_host(parameters: Mapping[str, Blocks]) -> bool:
    """Tests whether any parameter is in host memory."""
    return any(map(is_on_host, jax.tree.leaves(parameters)))


def move_to_device(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Copies parameters from host memory to the device."""
    device = jax.memory.Space.Device
    return {
        path: jax.device_put(leaf, device) if is_on_host(leaf) else leaf
        for path, leaf in parameters.items()
    }


def put_in_pinned_memory(array: np.ndarray) -> Array:
    """Puts an array into the pinned memory of the first device's host."""
    device = jax.devices()[0]
    return jax.device_put(
        array, jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    )


def is_on_host(leaf: Array) -> bool:
    """Tests whether an array is in host memory."""
    return jax.typeof(leaf).memory_space == HOST
