"""Weights in the host's pinned memory, which a block brings to the device for itself.

An array says in its type where it lies, inside a trace too, so that the models need no
setting: what lies on the device is left alone. A loop over blocks brings one block's
slice; wrapped as `rematerialization` wraps what is gathered from other devices, its
backward pass brings it again and keeps no copy.
"""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array

HOST = jax.memory.Space.Host
PINNED = "pinned_host"


def any_on_host(parameters: Mapping[str, Array]) -> bool:
    """Whether some of the parameters lie in the host's memory."""
    return any(is_on_host(leaf) for leaf in parameters.values())


def move_to_device(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """The parameters, those of the host's memory brought to the device."""
    device = jax.memory.Space.Device
    return {
        path: jax.device_put(leaf, device) if is_on_host(leaf) else leaf
        for path, leaf in parameters.items()
    }


def put_in_pinned_memory(array: np.ndarray) -> Array:
    """The array in the pinned memory of the first device's host."""
    device = jax.devices()[0]
    return jax.device_put(
        array, jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    )


def is_on_host(leaf: Array) -> bool:
    """Whether an array lies in the host's memory."""
    return jax.typeof(leaf).memory_space == HOST
