"""A terminal line that shows what a command is doing, and how far it is.

The names of stages come from `core.status_line`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prompt_tuning.core.status_line import show_status

if TYPE_CHECKING:
    from rich.console import Console

STARTING = "starting"
REFRESHES = 2
"""Refreshes in each second; each takes milliseconds of a processor."""


class ProgressDisplay:
    """A spinner, the name of the stage, a bar if the work is measured, and times.

    Args:
      name: what the command does; stages show their names instead while they last.
      total: units of work; None if unknown.
      done: units already done.
      console: console to show it on; None for standard error.
      stays: whether the line stays when it ends.
      in_bytes: whether the units are bytes.
    """

    def __init__(
        self,
        name: str = "",
        total: int | None = None,
        *,
        done: int = 0,
        console: "Console | None" = None,
        stays: bool = False,
        in_bytes: bool = False,
    ):
        from rich import progress
        from rich.console import Console

        text = progress.TextColumn("{task.description}", markup=False)
        columns = [progress.SpinnerColumn(), text, progress.TimeElapsedColumn()]
        if total is not None:
            bar = progress.BarColumn(bar_width=20)
            count = progress.DownloadColumn if in_bytes else progress.MofNCompleteColumn
            columns[2:2] = [bar, count()]
            columns.append(progress.TimeRemainingColumn())
            columns.append(progress.TextColumn("{task.fields[note]}", markup=False))
        self._progress = progress.Progress(
            *columns,
            console=console or Console(stderr=True),
            refresh_per_second=REFRESHES,
            transient=not stays,
            # What a file or another program reads must not go to the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._name, self._note = name, ""
        self._task = self._progress.add_task(name, total=total, completed=done, note="")

    def __enter__(self) -> "ProgressDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def show(self, stage: str | None) -> None:
        """Shows a stage's name and clears the note; None when the stage has ended."""
        note = "" if stage else self._note
        self._progress.update(self._task, description=stage or self._name, note=note)

    def advance(self, count: int) -> None:
        """Adds to the units done."""
        self._progress.advance(self._task, count)

    def reach(self, done: int, note: str | None = None) -> None:
        """Sets the units done, and the text after the bar if given."""
        self._progress.update(self._task, completed=done)
        if note is not None:
            self._note = note
            self._progress.update(self._task, note=note)

    def say(self, text: str) -> None:
        """Prints a line above the display."""
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def shown_activity(*, lines: bool = False) -> Iterator[None]:
    """Shows long stages on standard error while they last, if it is a terminal.

    The first stage is the imports and the start of JAX; any other one ends it. With
    `lines`, prints each stage's name where there is no terminal.
    """
    if not sys.stderr.isatty() and not lines:
        yield
        return
    show = _show_spinner() if sys.stderr.isatty() else _print_once()
    try:
        show(STARTING)
        with show_status(show):
            yield
    finally:
        show(None)


def _show_spinner() -> Callable[[str | None], None]:
    """Returns a function that shows a name, or removes the line for None."""
    display = ProgressDisplay()

    def show(stage: str | None) -> None:
        if stage is None:
            display.__exit__()
        else:
            display.show(stage)
            display.__enter__()

    return show


def _print_once() -> Callable[[str | None], None]:
    printed: set[str | None] = {None}

    def show(stage: str | None) -> None:
        if stage not in printed:
            printed.add(stage)
            print(stage, file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def progress_bar(
    name: str, total: int, *, shown: bool = True, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal's standard error; yields the function that moves it.

    Args:
      name: what the command does; stages show their names instead while they last.
      total: number of units of work.
      shown: whether to show it at all.
      in_bytes: whether the units are bytes.
    """
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    display = ProgressDisplay(name, total, in_bytes=in_bytes)
    with display, show_status(display.show):
        yield display.advance


@contextlib.contextmanager
def noted_bar(
    name: str, total: int, *, shown: bool = True
) -> Iterator[Callable[[int, str], None]]:
    """Shows a bar with a note after it; takes the arguments of `progress_bar`.

    Where standard error is not a terminal, the last note is printed at the end.
    """
    done, note = 0, ""
    display = None
    if shown and sys.stderr.isatty():
        display = ProgressDisplay(name, total)

    def advance(count: int, text: str) -> None:
        nonlocal done, note
        done, note = done + count, text
        if display is not None:
            display.reach(done, text)

    if display is not None:
        with display, show_status(display.show):
            yield advance
    else:
        yield advance
        if shown and note:
            print(f"{name}: {done} of {total}, {note}", file=sys.stderr, flush=True)
