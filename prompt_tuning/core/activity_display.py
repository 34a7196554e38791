"""Shows on a terminal what a command is doing, from the first import on."""

import contextlib
import sys
from collections.abc import Iterator

from prompt_tuning.core.activity import displayed_by

STARTING = "starting"
REFRESHES = 2
"""Refreshes in each second; each takes milliseconds of a processor."""


@contextlib.contextmanager
def shown_activity(*, lines: bool = False) -> Iterator[None]:
    """Shows long stages on standard error while they last, if it is a terminal.

    The first one, which any other ends, consists of the imports and the start of JAX.

    Args:
      lines: whether to print the name of each stage where it is not a terminal.
    """
    if not sys.stderr.isatty() and not lines:
        yield
        return
    display = _ActivityLine() if sys.stderr.isatty() else _Lines()
    try:
        display.show(STARTING)
        with displayed_by(display.show):
            yield
    finally:
        display.show(None)


class _Lines:
    """Prints each name once."""

    def __init__(self):
        self._shown: set[str] = set()

    def show(self, name: str | None) -> None:
        """Prints a name that is new."""
        if name is not None and name not in self._shown:
            self._shown.add(name)
            print(name, file=sys.stderr, flush=True)


class _ActivityLine:
    """A spinner, the name of the stage, and the time since the start of the command."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import (
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            refresh_per_second=REFRESHES,
            transient=True,
            # What a file or another program reads must not go to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("")

    def show(self, name: str | None) -> None:
        """Shows a name; removes the line if there is none."""
        if name is None:
            self._progress.stop()
        else:
            self._progress.update(self._task, description=name)
            self._progress.start()
