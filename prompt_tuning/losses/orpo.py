"""Odds ratio preference optimization, which needs no reference."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.losses.preference import AnswerScores, PreferenceObjective, lead


@dataclasses.dataclass(frozen=True)
class ORPO(PreferenceObjective):
    """Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7).

    In one run and without a reference, it learns the chosen answers like
    `TokenObjective`, and also that they are more likely than the rejected ones. With
    `p` the probability of an answer, as the geometric mean over its tokens, and `odds =
    p / (1 - p)`, the loss of a pair is `-log p_chosen - beta * log sigmoid(log
    odds_chosen - log odds_rejected)`.

    Attributes:
      beta: weight of the odds ratio; the paper calls it lambda.

    Raises:
      InputError: if `beta` is not above 0.

    Examples:
      >>> rows = [
      ...     {"prompt": p, "chosen": c.upper(), "rejected": c} for p, c in pairs
      ... ]
      >>> loss = pt.ORPO()
      >>> tuned = pt.tune(
      ...     model, pt.SoftPrompt(5), rows, objective=loss, steps=2, progress=False
      ... )
    """

    beta: PositiveNumber = 0.1

    def __post_init__(self):
        check_fields(self)

    def pair_losses(
        self, scores: AnswerScores
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns the loss of each pair, and the lead of its log-odds."""
        log_p = scores.means
        # log(1 - p) by expm1, which is exact where p is near 1; below it for p = 1.
        complement = -jnp.expm1(jnp.minimum(log_p, -jnp.finfo(log_p.dtype).eps))
        leads = lead(log_p - jnp.log(complement))
        return -log_p[:, 0] - float(self.beta) * jax.nn.log_sigmoid(leads), leads
