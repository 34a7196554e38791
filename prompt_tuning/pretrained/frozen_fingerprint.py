"""A digest that identifies a frozen model, or what a run trained over it."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from prompt_tuning.core.quantization.stores import part_path
from prompt_tuning.models.host_memory import is_on_host
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight

Index = tuple[Any, ...]


def fingerprint(
    frozen: Mapping[str, Array | np.ndarray | LayeredWeight],
    placement: Placement | None = None,
    samples: int = 64,
) -> str:
    """Computes a digest that identifies the frozen model.

    It covers every parameter's path, shape and dtype, and `samples` evenly spaced
    numbers from each, so it is fast even for large models. It does not depend on the
    mesh: scales in codes count as the float32 scales that some meshes need. `samples`
    values are read from each parameter.
    """
    digest = hashlib.sha256()
    shapes = frozen if placement is None else placement.abstract
    on_cpu = placement is None and jax.default_backend() == "cpu"

    def read(path: str, index: Index) -> np.ndarray:
        leaf: Any = frozen[path]
        if isinstance(leaf, jax.Array) and (on_cpu or is_on_host(leaf)):
            # NumPy reads host memory directly; indexing a JAX array would compile a
            # program for each shape.
            leaf = np.asarray(leaf)
        values = leaf[index] if math.prod(shapes[path].shape) else leaf
        if placement is not None and isinstance(values, jax.Array):
            values = placement.to_host(values)
        return np.asarray(values)

    kernels = [path for path in frozen if part_path(path, "nested") in frozen]
    nested = {part_path(path, "scale"): path for path in kernels}
    left_out = {part_path(path, "nested") for path in kernels}
    left_out |= {part_path(path, "nested_codebook") for path in kernels}
    for path in sorted(frozen.keys() - left_out):
        shape = tuple(shapes[path].shape)
        size = math.prod(shape)
        positions = np.linspace(0, size - 1, min(samples, size)).astype(int)
        index = np.unravel_index(positions, shape) if size else ()
        if path in nested:
            blocks = shapes[part_path(nested[path], "nested")].shape[-2]
            values = _scales(nested[path], index, shape[-2] // blocks, read)
        else:
            values = read(path, index)
        digest.update(f"{path} {shape} {values.dtype}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _scales(
    kernel: str, index: Index, n: int, read: Callable[[str, Index], np.ndarray]
) -> Float32[np.ndarray, "_"]:
    """Returns a kernel's scales that are stored as codes, in blocks of `n`."""
    *lead, group, column = index
    table = part_path(kernel, "nested_codebook")
    codes = read(part_path(kernel, "scale"), index).astype(int)
    largest = read(part_path(kernel, "nested"), (*lead, group // n, column))
    offset = read(table, (*lead, np.full_like(group, 256)))  # behind the values
    return read(table, (*lead, codes)) * largest + offset
