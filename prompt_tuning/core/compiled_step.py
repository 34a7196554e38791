"""A jitted step that returns the compiler's memory before it runs.

Compiling takes a hundred megabytes or more. The C library keeps them after they are
freed, and the step would allocate its own memory on top; so they are returned to the
system first.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import jax


class CompiledStep:
    """A function that is compiled once for each shape of batch.

    Attributes:
      jitted: the jitted function.
    """

    def __init__(self, function: Callable[..., Any]):
        """Wraps a function of (state, frozen, batch); the state is donated."""
        self.jitted = jax.jit(function, donate_argnums=0)
        self._compiled: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(self, state: Any, frozen: Any, batch: Any) -> Any:
        """Runs the step, after compiling it if the batch has a new shape."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._compiled:
            self.lower(state, frozen, batch).compile()
            return_freed_memory()
            self._compiled.add(shapes)
        return self.jitted(state, frozen, batch)

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        return len(self._compiled)

    def lower(self, state: Any, frozen: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program, before it is compiled."""
        return self.jitted.lower(state, frozen, batch)


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library has a call for that."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
