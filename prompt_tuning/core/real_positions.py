"""Which inputs of projections are real, i.e. tokens or prompts, not padding.

A projection does not know this, so the stack sets it while its blocks are traced.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from jaxtyping import Array, Bool

Marks = Callable[[], Bool[Array, "n"]]

_marks: contextvars.ContextVar[Marks | None] = contextvars.ContextVar(
    "_marks", default=None
)


@contextlib.contextmanager
def real_positions(marks: Marks | None) -> Iterator[None]:
    """Sets the function that marks the projections' real inputs; None if unknown.

    It is called only if an adapter asks.
    """
    token = _marks.set(marks)
    try:
        yield
    finally:
        _marks.reset(token)


def marked_positions() -> Bool[Array, "n"] | None:
    """Returns a mark for each input of a projection; None if unknown."""
    marks = _marks.get()
    return None if marks is None else marks()
