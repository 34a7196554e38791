"""A bar for the progress of a command whose amount of work is known."""

import contextlib
from collections.abc import Callable, Iterator

from prompt_tuning.core.activity import displayed_by


@contextlib.contextmanager
def progress_bar(
    name: str, total: int, *, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal's standard error; yields the function that moves it.

    Args:
      name: what the command does; the names of stages replace it while they last.
      total: number of units of work.
      shown: whether to show it at all.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from prompt_tuning.processes.group import is_first

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal and is_first()),
    ) as progress:
        task = progress.add_task(name, total=total)

        def rename(stage: str | None) -> None:
            progress.update(task, description=stage or name)

        with displayed_by(rename):
            yield lambda count: progress.advance(task, count)
