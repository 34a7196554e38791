"""Progress display: a live bar on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@runtime_checkable
class Reporter(Protocol):
    """Shows the progress of a training run."""

    def __enter__(self) -> "Reporter": ...

    def __exit__(self, *exception) -> None: ...

    def say(self, text: str) -> None:
        """Prints a message that stays."""
        ...

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Shows that a step is done; `metrics` is None unless they were logged."""
        ...


class LiveReporter:
    """A rich progress bar with the newest metrics next to it."""

    def __init__(self, console: Console, steps: int, done: int):
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[newest]}"),
            console=console,
        )
        self._task = self._progress.add_task(
            "training", total=steps, completed=done, newest=""
        )

    def __enter__(self) -> "LiveReporter":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=step)
        if metrics is not None:
            self._progress.update(self._task, newest=brief(metrics))


class LineReporter:
    """One plain line for each line of the log."""

    def __init__(self, console: Console, steps: int):
        self._console, self._steps = console, steps

    def __enter__(self) -> "LineReporter":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Prints the step's metrics."""
        if metrics is not None:
            self.say(f"step {step}/{self._steps}  {brief(metrics)}")


def make_reporter(console: Console, steps: int, done: int) -> Reporter:
    """Creates a bar on a terminal, and lines elsewhere."""
    if console.is_terminal:
        return LiveReporter(console, steps, done)
    return LineReporter(console, steps)


def brief(metrics: Mapping[str, float]) -> str:
    """Formats the metrics that fit next to a bar."""
    shown = (
        ("loss", "loss {:.4f}"),
        ("best_loss", "best loss {:.4f}"),
        ("median_loss", "median {:.4f}"),
        ("accuracy", "accuracy {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
    )
    return "  ".join(
        form.format(metrics[name]) for name, form in shown if name in metrics
    )
