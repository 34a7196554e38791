"""When a run has had enough: its held-out metric has not improved for a while."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import replace_file

STOPPED_FILE = "stopped.json"
EXTRA = "early_stopping"
"""The name under which a checkpoint keeps it."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """What a run has seen of its metric; part of each checkpoint, so a kill loses none.

    Attributes:
      metric: its name.
      direction: "min" or "max", which of its values is better.
      limit: evaluations without a better value after which the run stops.
      waited: those since the best.
      best: the best value; None before the first evaluation.
      best_step: at which step it was measured; the earliest of equals.
    """

    metric: str
    direction: str
    limit: int
    waited: int = 0
    best: float | None = None
    best_step: int = 0

    def observe(self, step: int, measured: Mapping[str, float]) -> "Patience":
        """What is known after an evaluation; the same where nothing was measured."""
        if self.metric not in measured:
            return self
        value = measured[self.metric]
        sign = 1 if self.direction == "min" else -1
        if self.best is None or sign * value < sign * self.best:
            return dataclasses.replace(self, waited=0, best=value, best_step=step)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def reason(self) -> str | None:
        """Why the run stops; None while it goes on."""
        if self.waited < self.limit:
            return None
        return (
            f"{self.metric} was best at step {self.best_step} ({self.best:.4f}) and "
            f"not better in {self.waited} evaluations since"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {
            "waited": self.waited,
            "best": self.best,
            "best_step": self.best_step,
        }

    def with_state(self, extra: Mapping[str, Any]) -> "Patience":
        """What a checkpoint kept among its extras."""
        return dataclasses.replace(self, **extra.get(EXTRA, {}))


def record_stop(directory: Path, step: int, reason: str) -> None:
    """Writes down in the run's directory why it stopped, and after which step."""
    content = json.dumps({"step": step, "reason": reason}, indent=1)
    replace_file(directory / STOPPED_FILE, content + "\n")


def open_patience(run: Run, folder: Path, step: int) -> Patience | None:
    """The patience of a run that starts, or goes on from a checkpoint.

    Args:
      run: says the metric and the limit.
      folder: of its checkpoints.
      step: of the checkpoint, 0 for none.

    Returns:
      None if the run always takes all of its steps.
    """
    if not run.early_stopping:
        return None
    assert run.keep_best is not None
    patience = Patience(*run.keep_best, run.early_stopping)
    if not step:
        return patience
    state = checkpoint_files.read_state(folder / f"checkpoint_{step}")
    return patience.with_state(state["extra"])
