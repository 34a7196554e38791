"""Stop a run when its held-out metric no longer improves."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.config.config_values import STOPPED_FILE
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.typed_json import JsonObject

EXTRA = "early_stopping"
"""Key of this state in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """The history of a run's metric, stored in each checkpoint.

    Attributes:
      metric: name of the metric.
      direction: "min" or "max", whichever is better.
      limit: number of consecutive evaluations without improvement after which the run
        stops.
      waited: number of evaluations since the best one.
      best: best value; None before the first evaluation.
      best_step: step of the best value; the earliest of equals.
    """

    metric: str
    direction: str
    limit: int
    waited: int = 0
    best: float | None = None
    best_step: int = 0

    def observe(self, step: int, measured: Mapping[str, float]) -> "Patience":
        """Returns the state after an evaluation; unchanged if the metric is missing."""
        if self.metric not in measured:
            return self
        value = measured[self.metric]
        sign = 1 if self.direction == "min" else -1
        if self.best is None or sign * value < sign * self.best:
            return dataclasses.replace(self, waited=0, best=value, best_step=step)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def reason(self) -> str | None:
        """The reason for stopping; None to continue."""
        if self.waited < self.limit:
            return None
        return (
            f"{self.metric} was best at step {self.best_step} ({self.best:.4f}) and "
            f"not better in {self.waited} evaluations since"
        )

    def state(self) -> dict[str, Any]:
        """The part that a checkpoint stores, as JSON."""
        return {
            "waited": self.waited,
            "best": self.best,
            "best_step": self.best_step,
        }

    def with_state(self, extra: Mapping[str, Any]) -> "Patience":
        """Returns the state stored in the `extra` of a checkpoint.

        Raises:
          InputError: if a field has the wrong type.
        """
        stored = JsonObject("the state of a checkpoint", extra).nested(EXTRA, {})
        return dataclasses.replace(
            self,
            waited=stored.integer("waited", 0),
            best=stored.number("best", None),
            best_step=stored.integer("best_step", 0),
        )


def record_stop(directory: Path, step: int, reason: str) -> None:
    """Writes the reason and the step of a stop to the run directory."""
    content = json.dumps({"step": step, "reason": reason}, indent=1)
    replace_file(directory / STOPPED_FILE, content + "\n")


def open_patience(run: Run, folder: Path, step: int) -> Patience | None:
    """Returns the patience of a run at the step of a checkpoint, 0 for none.

    `folder` has the checkpoints. Returns None if the run always takes
    all of its steps.
    """
    if not run.early_stopping:
        return None
    assert run.stops_by is not None
    patience = Patience(*run.stops_by, run.early_stopping)
    if not step:
        return patience
    state = checkpoint_files.read_state(folder / f"checkpoint_{step}")
    return patience.with_state(state["extra"])
