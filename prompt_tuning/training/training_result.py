"""What a call of `train` returns."""

import dataclasses

from prompt_tuning.core.parameters import Parameters


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Outcome of a call of `train`, and the `result` of what `tune` returns.

    Attributes:
      step: number of completed steps.
      finished: whether the run is complete; False if a signal stopped it, and the same
        command resumes it.
      trained: trained parameters after the last step.
      metrics: metrics of the last evaluation in this call; empty without one.
      reason: why the run stopped before its last step, by `Run.early_stopping`; None if
        it did not.
      interrupted: whether Ctrl-C stopped the run.
      epochs: how often the completed steps have read each example.

    Examples:
      >>> tuned.result.finished, tuned.result.epochs
      (True, 2.0)
    """

    step: int
    finished: bool
    trained: Parameters
    metrics: dict[str, float]
    reason: str | None = None
    interrupted: bool = False
    epochs: float = 0.0
