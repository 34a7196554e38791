"""Names of long stages, for a display that shows what a command is doing.

Whoever starts a long stage names it by `activity`; a command or a progress bar shows
the name, by `displayed_by`. Without a display, names are ignored.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Display = Callable[[str | None], None]
"""Shows the name of the current stage, or None if there is none."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)
_name: ContextVar[str | None] = ContextVar("name", default=None)
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextlib.contextmanager
def displayed_by(display: Display | None) -> Iterator[None]:
    """Shows the stages within by a display; None shows none of them."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextlib.contextmanager
def activity(name: str | None = None) -> Iterator[None]:
    """Names what happens within; None if only a call of `rename` within names it."""
    before, token = _name.get(), _inside.set(True)
    if name is not None:
        rename(name)
    try:
        yield
    finally:
        if _name.get() != before:
            rename(before)
        _inside.reset(token)


def rename(name: str | None) -> None:
    """Renames the current stage until the enclosing `activity` ends; else does nothing.

    A function that `jax.jit` traces calls this to tell that it is about to be compiled.
    """
    if _inside.get():
        _show(name)


def clear() -> None:
    """Shows no stage until the next one begins."""
    _show(None)


def _show(name: str | None) -> None:
    _name.set(name)
    display = _display.get()
    if display is not None:
        display(name)
