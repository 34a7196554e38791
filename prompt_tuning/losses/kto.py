"""Kahneman-Tversky optimization: learning from single rated answers."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.output_head import AnyHead
from prompt_tuning.losses.preference import (
    IN_STEP,
    AnswerObjective,
    Reference,
    log_ratios,
    open_reference,
)


@dataclasses.dataclass(frozen=True)
class KTO(objective.ObjectiveConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equation 7).

    Use it if people have rated single answers. Each record has a `prompt`, a
    `completion`, and a `label`: true for a good answer, false for a bad one. With `r`
    the log-ratio of an answer's probabilities under the trained and the frozen model,
    the loss is `1 - sigmoid(beta (r - z))` for a good answer and `1 - sigmoid(beta (z -
    r))` for a bad one. The reference point `z`, at least 0, is the mean log-ratio of
    mismatched answers: each prompt is also read with the preceding record's answer. The
    mean is over a micro-batch, as in TRL, and has no gradient.

    The frozen model is the reference, as for `DPO`. `accuracy` is the share of good
    answers with `r > z` and bad ones with `r < z`.

    Attributes:
      beta: strength of the pull towards the frozen model.
      reference: "in_step", "precomputed", "none" or a run's directory, as for `DPO`.
      desirable_weight: weight of good answers, e.g. above 1 if there are fewer of them.
      undesirable_weight: weight of bad answers.

    Raises:
      InputError: if a number is not above 0.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "completion": c, "label": len(c) > 4} for p, c in pairs
      ... ]
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=pt.KTO(), steps=2, progress=False
      ... )
    """

    beta: PositiveNumber = 0.1
    desirable_weight: PositiveNumber = 1.0
    undesirable_weight: PositiveNumber = 1.0
    reference: str = IN_STEP

    def __post_init__(self):
        check_fields(self)

    @property
    def rates_answers(self) -> bool:
        """True: data have an answer to each prompt, and whether it is good."""
        return True

    def prepare(self, open_teacher: objective.OpenTeacher) -> "ReferencedKTO":
        """Opens the frozen model as the reference; see `ObjectiveConfig`."""
        return ReferencedKTO(self, open_reference(self.reference, open_teacher))


@dataclasses.dataclass(frozen=True)
class ReferencedKTO(AnswerObjective):
    """`KTO` with its reference.

    An example's two rows are a prompt with its own answer, and with another prompt's.

    Attributes:
      settings: the settings.
      reference: the frozen model, alone or with another run's adapters; None without a
        reference.
    """

    settings: KTO
    reference: Reference | None

    def outcomes(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None,
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns each answer's loss, and its lead on the right side of `z`."""
        ratios = log_ratios(self.reference, hidden, head, batch, parameters).totals
        return self.answer_losses(ratios, batch)

    def answer_losses(
        self, ratios: Float[Array, "E 2"], batch: Batch
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Computes losses and leads from the log-ratios of both rows."""
        settings, good = self.settings, jnp.asarray(batch.gold) == 1
        real = jnp.asarray(batch.example_weights) > 0
        mismatched = jax.lax.stop_gradient(ratios[:, 1])
        mean = jnp.sum(jnp.where(real, mismatched, 0)) / jnp.maximum(jnp.sum(real), 1)
        leads = (ratios[:, 0] - jnp.maximum(mean, 0)) * jnp.where(good, 1, -1)
        weights = jnp.where(
            good, float(settings.desirable_weight), float(settings.undesirable_weight)
        )
        return weights * jax.nn.sigmoid(-float(settings.beta) * leads), leads
