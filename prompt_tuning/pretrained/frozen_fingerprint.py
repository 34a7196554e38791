"""A digest that identifies a frozen model, or what a run trained over it."""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from prompt_tuning.models.host_memory import is_on_host
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight


def fingerprint(
    frozen: Mapping[str, Array | np.ndarray | LayeredWeight],
    placement: Placement | None = None,
    samples: int = 64,
) -> str:
    """Computes a digest that identifies the frozen model.

    It covers every parameter's path, shape and dtype, and `samples` evenly spaced
    numbers of each, so that it is fast for large models. It does not depend on the
    mesh.

    Args:
      frozen: frozen parameters.
      placement: the parameters' shardings on a mesh; None on one device.
      samples: number of values read from each parameter.
    """
    digest = hashlib.sha256()
    on_cpu = placement is None and jax.default_backend() == "cpu"
    for path in sorted(frozen):
        leaf: Any = frozen[path]
        shape = leaf.shape if placement is None else placement.abstract[path].shape
        size = math.prod(shape)
        digest.update(f"{path} {shape} {leaf.dtype}".encode())
        positions = np.linspace(0, size - 1, min(samples, size)).astype(int)
        if isinstance(leaf, jax.Array) and (on_cpu or is_on_host(leaf)):
            # NumPy reads host memory directly; indexing a JAX array would compile a
            # program for each shape.
            leaf = np.asarray(leaf)
        values = leaf[np.unravel_index(positions, shape)] if size else leaf
        if placement is not None and isinstance(values, jax.Array):
            values = placement.to_host(values)
        digest.update(np.asarray(values).tobytes())
    return digest.hexdigest()
