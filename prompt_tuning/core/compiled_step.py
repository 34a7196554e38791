"""A jitted step that returns the compiler's memory before it runs.

Compiling takes a hundred megabytes or more. The C library keeps them after they are
freed, and the step would allocate its own memory on top; so they are returned to the
system first.
"""

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import jax

from prompt_tuning.core.activity import activity
from prompt_tuning.core.batch import Batch

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the arrays of a batch."""


class CompiledStep:
    """A function that is compiled once for each shape of batch.

    Attributes:
      jitted: the jitted function.
    """

    def __init__(self, function: Callable[..., Any], shapes: int | None = None):
        """Wraps a function of (state, frozen, batch); the state is donated.

        Args:
          function: the function.
          shapes: number of shapes of the batches, shown while one is compiled; None if
            unknown.
        """
        self.jitted = jax.jit(function, donate_argnums=0)
        self._shapes = shapes
        self._compiled: set[Shapes] = set()
        self._ahead: dict[Shapes, Future[None]] = {}

    def __call__(self, state: Any, frozen: Any, batch: Batch) -> Any:
        """Runs the step, after compiling it if the batch has a new shape."""
        shapes = _shapes(batch)
        if shapes not in self._compiled:
            with activity(self._describe(batch)):
                ahead = self._ahead.pop(shapes, None)
                if ahead is None or ahead.cancelled():
                    self._compile(state, frozen, batch)
                else:
                    ahead.result()
            self._compiled.add(shapes)
        return self.jitted(state, frozen, batch)

    def compile_ahead(
        self, executor: Executor, state: Any, frozen: Any, batch: Batch
    ) -> None:
        """Compiles for the shape of a batch in another thread, if it is new.

        Args:
          executor: runs the compiler.
          state: shapes of the state, see `abstract`.
          frozen: shapes of the frozen parameters.
          batch: a batch of the shape.
        """
        shapes = _shapes(batch)
        if shapes not in self._compiled and shapes not in self._ahead:
            self._ahead[shapes] = executor.submit(
                self._compile, state, frozen, abstract(batch)
            )

    def _compile(self, state: Any, frozen: Any, batch: Batch) -> None:
        self.lower(state, frozen, batch).compile()
        return_freed_memory()

    def _describe(self, batch: Batch) -> str:
        """Names the compilation of the next program."""
        number = str(self.programs + 1)
        if self._shapes is not None:
            number += f" of {max(self._shapes, self.programs + 1)}"
        return f"compiling shape {number} ({batch.describe()})"

    @property
    def programs(self) -> int:
        """Number of compiled programs."""
        return len(self._compiled)

    def lower(self, state: Any, frozen: Any, batch: Any) -> jax.stages.Lowered:
        """Returns the lowered program, before it is compiled."""
        return self.jitted.lower(state, frozen, batch)


def _shapes(batch: Batch) -> Shapes:
    return tuple(leaf.shape for leaf in jax.tree.leaves(batch))


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
    """Returns freed memory to the system, if the C library has a call for that."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
