"""The result of `train`."""

import dataclasses

from prompt_tuning.core.parameters import Parameters


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """The result of a call of `train`; also `TunedModel.result`.

    Attributes:
      step: number of completed steps.
      finished: whether the run is complete; False if a signal stopped it, so the same
        call resumes it.
      trained: trained parameters after the last step.
      metrics: metrics of the last evaluation in this call; empty without one.
      reason: why the run stopped early (`Run.early_stopping`); None if it did not.
      interrupted: whether Ctrl-C stopped the run.
      epochs: number of passes over the examples in the completed steps.

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
