"""Direct preference optimization, with the frozen model as the reference."""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import PositiveNumber, ShareBelowOne
from prompt_tuning.losses import preference
from prompt_tuning.losses.objective import ObjectiveConfig, OpenTeacher


@dataclasses.dataclass(frozen=True)
class DPO(ObjectiveConfig):
    """Direct preference optimization (Rafailov et al. 2023, equation 7).

    Use it to teach which of two answers is better. Each record has a `prompt`, a
    `chosen` and a `rejected` answer. With `r` the log-ratio of an answer's
    probabilities under the trained and the frozen model, and `d = r_chosen -
    r_rejected`, the loss of a pair is

    - "sigmoid": `-(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d)`, with `s =
      label_smoothing`;
    - "robust": `(-(1 - s) log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s)`,
      if a share `s` of the labels is wrong (Chowdhury et al. 2024, equation 9);
    - "hinge": `max(0, 1 - beta d)` (Zhao et al. 2023, equation 6);
    - "ipo": `(d - 1 / (2 beta))**2`, where `d` has means over the tokens of each answer
      (Azar et al. 2023, equation 17).

    The frozen model is the reference, so a step needs no second copy of the weights: it
    runs the same weights once more without the trained parameters. `accuracy` is the
    share of pairs with `d > 0`.

    Attributes:
      beta: strength of the pull towards the frozen model.
      loss: "sigmoid", "robust", "hinge" or "ipo".
      label_smoothing: assumed share of wrongly labeled pairs, for "sigmoid" and
        "robust".
      length_normalize: whether log-ratios are means over the tokens of each answer
        instead of sums; always so for "ipo".
      reference: "in_step" runs the frozen model in each step; "precomputed" runs it
        once for every record, before the first step, and stores its log-probabilities
        in the run directory (`reference.npz`), which takes less time from the second
        epoch on; "none" compares the probabilities themselves. To use another run of
        the same model as the reference, e.g. the one that this run starts from, give
        its directory; its log-probabilities are precomputed.

    Raises:
      InputError: if a number is out of range, or smoothing does not apply to the loss.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=pt.DPO(), steps=2, progress=False
      ... )
    """

    beta: PositiveNumber = 0.1
    loss: Literal["sigmoid", "robust", "hinge", "ipo"] = "sigmoid"
    label_smoothing: ShareBelowOne = 0.0
    length_normalize: bool = False
    reference: str = preference.IN_STEP

    def __post_init__(self):
        check_fields(self)
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise InputError(
                f"DPO.label_smoothing is {self.label_smoothing}, which the loss "
                f"{self.loss!r} does not use: leave it out, or use 'sigmoid' or "
                "'robust'"
            )
        if self.loss == "robust" and self.label_smoothing >= 0.5:
            raise InputError(
                f"DPO.label_smoothing is {self.label_smoothing}, expected less than "
                "0.5 for the loss 'robust': if half of the labels are wrong, they say "
                "nothing"
            )

    @property
    def compares_answers(self) -> bool:
        """True: data have a chosen and a rejected answer to each prompt."""
        return True

    def prepare(self, open_teacher: OpenTeacher) -> "ReferencedDPO":
        """Opens the frozen model as the reference; see `ObjectiveConfig`."""
        return ReferencedDPO(
            self, preference.open_reference(self.reference, open_teacher)
        )


@dataclasses.dataclass(frozen=True)
class ReferencedDPO(preference.PreferenceObjective):
    """`DPO` with its reference.

    Attributes:
      settings: the settings.
      reference: the frozen model, alone or with another run's adapters; None without a
        reference.
    """

    settings: DPO
    reference: preference.Reference | None

    def pair_losses(
        self, scores: preference.AnswerScores
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns the loss of each pair of log-ratios, and its difference `d`."""
        settings, beta = self.settings, float(self.settings.beta)
        smoothing = float(settings.label_smoothing)
        by_token = settings.length_normalize or settings.loss == "ipo"
        leads = preference.lead(scores.means if by_token else scores.totals)
        if settings.loss == "ipo":
            return (leads - 1 / (2 * beta)) ** 2, leads
        if settings.loss == "hinge":
            return jax.nn.relu(1 - beta * leads), leads
        if settings.loss == "robust":
            # The sign of the second term is the only difference besides the divisor.
            losses = preference.smoothed_sigmoid_loss(beta * leads, smoothing)
            losses += 2 * smoothing * jax.nn.log_sigmoid(-beta * leads)
            return losses / (1 - 2 * smoothing), leads
        return preference.smoothed_sigmoid_loss(beta * leads, smoothing), leads
