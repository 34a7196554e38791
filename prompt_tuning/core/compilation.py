"""Compilation of programs: shapes, options, and the compiler's leftover memory."""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

IN_LOOPS = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
"""Option of XLA that leaves in a loop what is the same in all its iterations."""


class WeightedJit:
    """A jitted function of frozen weights, with compiler options that suit their dtype.

    On CPUs, XLA converts 16-bit weights to float32 before a product. In JAX 0.10 it
    also moves the conversion of each block's slice out of the loop over blocks, so that
    a second copy of the whole stack, twice as large, would be in memory. Keeping the
    conversion in the loop takes less time, too.

    Args:
      function: the function to compile; when you call this object, its first argument
        is the weights.
      **choices: keywords of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any], **choices: Any):
        jit = functools.partial(jax.jit, function, **choices)
        self._plain, self._in_loops = jit(), jit(compiler_options=IN_LOOPS)
        functools.update_wrapper(self, function)

    def __call__(self, weights: Any, *arguments: Any, **named: Any) -> Any:
        """Calls the function."""
        return self.given(weights)(weights, *arguments, **named)

    def given(self, weights: Any) -> Any:
        """Returns the jitted function for weights, or for their shapes and dtypes."""
        if jax.default_backend() != "cpu":
            return self._plain
        narrow = any(_is_narrow(leaf) for leaf in jax.tree.leaves(weights))
        return self._in_loops if narrow else self._plain


def _is_narrow(leaf: Any) -> bool:
    return leaf.dtype.name in ("bfloat16", "float16")


def abstract(tree: Any) -> Any:
    """Replaces arrays by shapes for which the same program is compiled."""
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

    Compiling takes a hundred megabytes or more. The C library would keep them, while a
    step allocates its own memory on top.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
