"""`prompt-tuning watch`: follows a run from another terminal."""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.config.config_values import (
    CONFIG_FILE,
    STOPPED_FILE,
    config_values,
    literal,
    resolved,
)
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import PositiveNumber

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = "follow a run from another terminal: its curves and newest answers"
HEADING = "Tune"
USES_JAX = False

ROWS = 7
"""Height of each curve in rows."""
ANSWERS = 3
"""Number of newest sampled answers to show."""
TAIL = 2**16
"""Number of bytes to read from the end of the file of answers."""
STALE = 60.0
"""Seconds without a new line after which a warning is shown."""

Log = Sequence[Mapping[str, int | float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--every",
        type=numeric(PositiveNumber),
        default=2.0,
        metavar="SECONDS",
        help="seconds between updates",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="show the current state and exit; always so if the output is not a "
        "terminal",
    )


def check(options: argparse.Namespace) -> None:
    """Checks that there are no bindings and the directory is a run's."""
    refuse_bindings(options)
    if not (options.run / CONFIG_FILE).is_file():
        raise InputError(
            f"{options.run} is not a run directory: it has no {CONFIG_FILE}. A run "
            "writes it when its model and data have been read"
        )


def run(options: argparse.Namespace) -> int:
    """Shows the run until it ends."""
    from rich.console import Console
    from rich.live import Live

    console, view = Console(), _View(options.run)
    view.look()
    if options.once or not console.is_terminal:
        console.print(view.render(console.width))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(view.render(console.width), refresh=True)
            if view.ended:
                return 0
            time.sleep(options.every)
            view.look()


class _View:
    """The known state of a run, and how fast its log grows."""

    def __init__(self, directory: Path):
        config = (directory / CONFIG_FILE).read_text("utf-8", errors="replace")
        steps = literal(resolved(config_values(config), "Run.steps"), 0)
        self._steps = steps if isinstance(steps, int) else 0
        self._directory, self._log = directory, []
        self._answers: list[dict[str, Any]] = []
        self._reason: str | None = None
        self._seen: list[tuple[float, int]] = []

    @property
    def _done(self) -> int:
        return int(self._log[-1]["step"]) if self._log else 0

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self._reason is not None or (0 < self._steps <= self._done)

    def look(self) -> None:
        """Reads what the run has written."""
        from prompt_tuning.training.metrics_log import METRICS_FILE, read_log

        file = self._directory / METRICS_FILE
        self._log = read_log(file, lambda _: None) if file.is_file() else []
        stopped = self._directory / STOPPED_FILE
        self._reason = None
        if stopped.is_file():
            self._reason = str(json.loads(stopped.read_text("utf-8")).get("reason"))
        self._answers = _newest_answers(self._directory)
        if not self._seen or self._seen[-1][1] != self._done:
            self._seen.append((time.monotonic(), self._done))

    def render(self, columns: int) -> "RenderableType":
        """Renders the view for a number of columns."""
        from rich.console import Group
        from rich.text import Text

        from prompt_tuning.report.terminal_curve import draw_curve

        parts = [Text(str(self._directory), style="bold"), Text(self._state())]
        for name, steps, values in _curves(self._log):
            parts.append(Text(f"\n{name}: {values[-1]:.4g} at step {steps[-1]:,}"))
            drawn = draw_curve(steps, values, columns, ROWS)
            parts.append(Text("\n".join(drawn), no_wrap=True))
        for answer in self._answers:
            parts.append(Text(f"\n{_answer_line(answer)}"))
        return Group(*parts)

    def _state(self) -> str:
        """Describes the progress of the run, and when it will end."""
        done = f"step {self._done:,} of {self._steps:,}"
        if self._reason is not None:
            return f"{done}, stopped: {self._reason}"
        if self.ended:
            return f"{done}, finished"
        if not self._log:
            return f"{done}; there is no line of the log yet"
        (start, first), (last, newest) = self._seen[0], self._seen[-1]
        if newest > first:
            left = (self._steps - newest) * (last - start) / (newest - first)
            done += f", about {_duration(left)} left"
        idle = time.monotonic() - last
        if idle > STALE:
            done += f"; no new line for {_duration(idle)}"
        return done


def _curves(log: Log) -> list[tuple[str, list[int], list[float]]]:
    """Returns the curves to draw: of training, and of held-out data."""
    from prompt_tuning.training.metrics_log import EVALUATION

    found = []
    held_out = (f"{EVALUATION}label_accuracy", f"{EVALUATION}loss")
    for names in (("reward", "loss"), held_out):
        for name in names:
            points = [
                (int(line["step"]), float(line[name]))
                for line in log
                if name in line and math.isfinite(line[name])
            ]
            if len(points) > 1:
                steps, values = map(list, zip(*points, strict=True))
                found.append((name, steps, values))
                break
    return found


def _newest_answers(directory: Path) -> list[dict[str, Any]]:
    """Returns the newest sampled answers of a run that learns from rewards."""
    from prompt_tuning.training.rollouts.rollout_log import ROLLOUTS_FILE

    file = directory / ROLLOUTS_FILE
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        opened.seek(max(file.stat().st_size - TAIL, 0))
        lines = opened.read().splitlines(keepends=True)
    answers = []
    for line in lines:
        # The first line may start before the tail, and the last one may be incomplete.
        try:
            content = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(content, dict):
            answers.append(content)
    return answers[-ANSWERS:]


def _answer_line(answer: Mapping[str, Any]) -> str:
    # Control characters of a model's answer must not reach the terminal.
    prompt, completion = (shown(answer.get(key)) for key in ("prompt", "completion"))
    step, reward = answer.get("step"), answer.get("reward")
    return f"step {step}, reward {reward}: {prompt} -> {completion}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
