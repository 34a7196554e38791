"""Frozen weights in pinned host memory, copied to the device one block at a time.

The type of an array records its memory space, also while tracing, so the models need no
setting: arrays on the device are left alone. The scan over blocks copies one block's
slice. It is rematerialized like weights gathered from other devices: the backward pass
copies the slice again instead of storing it.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array

from prompt_tuning.core.block_arrays import Blocks

HOST = jax.memory.Space.Host
PINNED = "pinned_host"


def any_on_host(parameters: Mapping[str, Blocks]) -> bool:
    """Returns whether any of the parameters is in host memory."""
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
    """Returns whether an array is in host memory."""
    return jax.typeof(leaf).memory_space == HOST
