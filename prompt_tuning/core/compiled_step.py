"""A jitted step whose compiler leaves no memory behind.

Compiling takes a hundred megabytes or more, which the C library keeps for itself once
they are freed, and the step would take its own beside them. They are given back first.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import jax


class CompiledStep:
    """A function that is compiled once for each shape of batch.

    Attributes:
      jitted: the function, jitted.
    """

    def __init__(self, function: Callable[..., Any]):
        """Wraps a function of (state, frozen, batch); the state is used up."""
        self.jitted = jax.jit(function, donate_argnums=0)
        self._known: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(self, state: Any, frozen: Any, batch: Any) -> Any:
        """Runs the step, after compiling it if the batch's shapes are new."""
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in self._known:
            self.lower(state, frozen, batch).compile()
            return_freed_memory()
            self._known.add(shapes)
        return self.jitted(state, frozen, batch)

    @property
    def programs(self) -> int:
        """How many programs it was compiled to."""
        return len(self._known)

    def lower(self, state: Any, frozen: Any, batch: Any) -> jax.stages.Lowered:
        """The program before it is compiled."""
        return self.jitted.lower(state, frozen, batch)


def return_freed_memory() -> None:
    """Gives what was freed back to the system, where the C library has a call."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
