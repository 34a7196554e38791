"""Progress display: a live bar on a terminal, plain lines elsewhere."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from prompt_tuning.core.progress_display import ProgressDisplay
from prompt_tuning.training.metrics_log import EVALUATION

TRAINING = "training"
COMPILING = "compiling"
"""Prefix of the names of stages that compile."""


class Reporter:
    """Shows the progress of a run; this base class shows nothing."""

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def say(self, text: str) -> None:
        """Prints a permanent message."""

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Shows that a step is done; `metrics` is None unless they were logged."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of an evaluation."""
        self.say(evaluation_line(step, metrics))

    def doing(self, name: str | None) -> None:
        """Shows the long stage that has started; None when it is over."""


class LiveReporter(Reporter):
    """Shows a bar on a terminal, with the newest metrics next to it."""

    def __init__(self, console: Console, steps: int, done: int):
        self._display = ProgressDisplay(
            TRAINING, steps, done=done, console=console, stays=True
        )

    def __enter__(self) -> "LiveReporter":
        self._display.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._display.__exit__(*exception)

    def say(self, text: str) -> None:
        """Prints above the bar."""
        self._display.say(text)

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Moves the bar."""
        self._display.reach(step, None if metrics is None else brief(metrics))

    def doing(self, name: str | None) -> None:
        """Shows the stage before the bar, instead of metrics."""
        self._display.show(name)


class LineReporter(Reporter):
    """Prints one plain line per line of the log."""

    def __init__(self, console: Console, steps: int):
        self._console, self._steps = console, steps
        self._named: set[str] = set()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Prints the step's metrics."""
        if metrics is not None:
            self.say(f"step {step}/{self._steps}  {brief(metrics)}")

    def doing(self, name: str | None) -> None:
        """Prints each compilation stage once."""
        if name is not None and name.startswith(COMPILING) and name not in self._named:
            self._named.add(name)
            self.say(name)


def make_reporter(console: Console, steps: int, done: int) -> Reporter:
    """Makes a bar on a terminal, and lines elsewhere."""
    if console.is_terminal:
        return LiveReporter(console, steps, done)
    return LineReporter(console, steps)


class NotebookReporter(Reporter):
    """Shows a bar in the output of a notebook cell, updated when metrics are logged."""

    def __init__(self, steps: int, done: int):
        from IPython.display import HTML, display

        self._html, self._steps, self._evaluation = HTML, steps, ""
        self._done, self._newest, self._doing = done, "", ""
        self._handle: Any = display(HTML(""), display_id=True)
        self.advance(done, {})

    def say(self, text: str) -> None:
        """Prints below the bar."""
        print(text)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics next to the bar from then on."""
        self._evaluation = f" (evaluation: {_values(metrics)})"

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Moves the bar."""
        self._done = step
        if metrics is not None or step == self._steps:
            self._newest = brief(metrics or {})
            self._update()

    def doing(self, name: str | None) -> None:
        """Shows the stage after the bar."""
        self._doing = f" ({name})" if name else ""
        self._update()

    def _update(self) -> None:
        self._handle.update(
            self._html(
                f"<progress value='{self._done}' max='{self._steps}'></progress> "
                f"{self._done}/{self._steps} {self._newest}{self._evaluation}"
                f"{self._doing}"
            )
        )


Callback = Callable[[int, Mapping[str, float]], Any]
"""Called with a step and its logged metrics; a true result stops the run."""


class CallbackReporter(Reporter):
    """Calls functions with logged metrics after another reporter has shown them.

    Attributes:
      stopped: whether one of them returned True.
    """

    def __init__(self, reporter: Reporter, callbacks: Sequence[Callback] = ()):
        self._reporter, self._callbacks = reporter, callbacks
        self.stopped = False
        self.say, self.doing = reporter.say, reporter.doing

    def __enter__(self) -> "CallbackReporter":
        self._reporter.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._reporter.__exit__(*exception)

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Calls the functions if metrics were logged."""
        self._reporter.advance(step, metrics)
        if metrics is not None:
            self._call(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Calls the functions with the metrics as `evaluation/NAME`."""
        self._reporter.evaluated(step, metrics)
        self._call(step, {f"{EVALUATION}{name}": x for name, x in metrics.items()})

    def _call(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            self.stopped |= bool(callback(step, metrics))


def python_reporter(steps: int, done: int, progress: bool = True) -> Reporter:
    """Makes the display of a run started from Python.

    With `progress`, it is a bar in a notebook or terminal and lines elsewhere; without,
    nothing.
    """
    if not progress:
        return Reporter()
    console = Console()
    if console.is_jupyter:
        return NotebookReporter(steps, done)
    return make_reporter(console, steps, done)


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """Formats the metrics of an evaluation."""
    return f"evaluation after step {step}: {_values(metrics)}"


def joint_metrics(lines: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Summarizes the members' logged metrics: best and median loss, and total speed.

    A single member's metrics stay as they are; None if nothing was logged.
    """
    if len(lines) < 2:
        return lines[0] if lines else None
    losses = [line["loss"] for line in lines]
    return {
        "best_loss": min(losses),
        "median_loss": statistics.median(losses),
        "tokens_per_second": sum(line["tokens_per_second"] for line in lines),
    }


def comparison_line(
    step: int, measured: Mapping[str, Mapping[str, float]], metric: str, direction: str
) -> str:
    """Compares a sweep's members by a metric, and names the best one."""
    values = {name: metrics[metric] for name, metrics in measured.items()}
    least, most = (
        min(values, key=values.__getitem__),
        max(values, key=values.__getitem__),
    )
    return (
        f"evaluation after step {step}: {metric} {values[least]:.4f} to "
        f"{values[most]:.4f}, best {least if direction == 'min' else most}"
    )


def _values(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def brief(metrics: Mapping[str, float]) -> str:
    """Formats the metrics that fit next to a bar."""
    shown = SHOWN_OF_ANSWERS if "answer_tokens" in metrics else SHOWN
    return "  ".join(
        form.format(metrics[name]) for name, form in shown if name in metrics
    )


SHOWN = (
    ("loss", "loss {:.4f}"),
    ("best_loss", "best loss {:.4f}"),
    ("median_loss", "median {:.4f}"),
    ("accuracy", "accuracy {:.3f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
)
SHOWN_OF_ANSWERS = (
    ("reward", "reward {:.3f}"),
    ("loss", "loss {:.4f}"),
    ("answer_tokens", "{:.1f} tokens"),
    ("kl", "KL {:.4f}"),
    ("entropy", "entropy {:.2f}"),
    ("equal_share", "equal groups {:.0%}"),
    ("sampled_per_second", "{:,.0f} sampled/s"),
    ("tokens_per_second", "{:,.0f} trained/s"),
)
"""Metrics of answers that `brief` shows, in order, with their formats."""
