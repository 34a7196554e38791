"""Shapes that a program is compiled for, and the memory that a compiler leaves."""

import ctypes
import sys
from typing import Any

import jax


def abstract(tree: Any) -> Any:
    """Returns a tree of arrays as shapes that the same program is compiled for."""
    return jax.tree.map(_abstract, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    placed = isinstance(leaf, jax.Array) and leaf.committed
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=leaf.sharding if placed else None,
        weak_type=jax.typeof(leaf).weak_type,
    )


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library has a call for that.

    Compiling takes a hundred megabytes or more. The C library keeps them, and a step
    would allocate its own memory on top.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
