"""Which inputs of projections belong to tokens and prompts, and not to padding.

A projection does not know. The stack sets it while its blocks are traced.
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
    """Sets a function that marks the real ones of the projections' inputs.

    It is called only if an adapter asks. None if the stack does not know.
    """
    token = _marks.set(marks)
    try:
        yield
    finally:
        _marks.reset(token)


def marked_positions() -> Bool[Array, "n"] | None:
    """Returns a mark for each input of a projection; None if the stack knows none."""
    marks = _marks.get()
    return None if marks is None else marks()
