"""Simple preference optimization, which needs no reference."""

import dataclasses

from jaxtyping import Array, Float

from prompt_tuning.core import number_ranges
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.losses.preference import (
    AnswerScores,
    PreferenceObjective,
    lead,
    smoothed_sigmoid_loss,
)


@dataclasses.dataclass(frozen=True)
class SimPO(PreferenceObjective):
    """Simple preference optimization (Meng et al. 2024, equation 6).

    With `p` the probability of an answer, as the geometric mean over its tokens, the
    loss of a pair is `-log sigmoid(beta * (log p_chosen - log p_rejected) - gamma)`. It
    needs no reference, so a step costs less than one of `DPO`.

    Attributes:
      beta: factor of the log-probabilities.
      gamma: margin by which the chosen answer should lead.
      label_smoothing: assumed share of wrongly labeled pairs.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> loss = pt.SimPO()
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=loss, steps=2, progress=False
      ... )
    """

    beta: number_ranges.PositiveNumber = 2.0
    gamma: number_ranges.NonnegativeNumber = 1.0
    label_smoothing: number_ranges.ShareBelowOne = 0.0

    def __post_init__(self):
        check_fields(self)

    def pair_losses(
        self, scores: AnswerScores
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns the loss of each pair, and the lead of its log-probability."""
        leads = lead(scores.means)
        margin = float(self.beta) * leads - float(self.gamma)
        return smoothed_sigmoid_loss(margin, float(self.label_smoothing)), leads
