"""Tells the user what a long stage of a command is doing, e.g. "compiling".

A long stage runs inside `status(...)`. A command or a progress bar displays it with
`show_status`; otherwise nothing is shown.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Display = Callable[[str | None], None]
"""Shows the name of the current stage; None clears it."""

_display: ContextVar[Display | None] = ContextVar("display", default=None)
_name: ContextVar[str | None] = ContextVar("name", default=None)
_inside: ContextVar[bool] = ContextVar("inside", default=False)


@contextlib.contextmanager
def show_status(display: Display | None) -> Iterator[None]:
    """Sends the status of everything inside to a display; None shows nothing."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextlib.contextmanager
def status(name: str | None = None) -> Iterator[None]:
    """Names a stage; without a name, `update_status` inside may name it."""
    previous, token = _name.get(), _inside.set(True)
    if name is not None:
        update_status(name)
    try:
        yield
    finally:
        if _name.get() != previous:
            update_status(previous)
        _inside.reset(token)


def update_status(name: str | None) -> None:
    """Renames the current stage until the enclosing `status` ends.

    Does nothing outside a `status`. Functions call this while `jax.jit` traces them,
    just before they are compiled.
    """
    if _inside.get():
        _show(name)


def clear_status() -> None:
    """Hides the stage until the next one begins."""
    _show(None)


def _show(name: str | None) -> None:
    _name.set(name)
    display = _display.get()
    if display is not None:
        display(name)
