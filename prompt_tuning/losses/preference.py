"""Base of the objectives that learn from how good answers are.

An example is two rows, e.g. a prompt with the chosen and with the rejected answer; the
loss compares the probabilities that the model gives to both.
"""

import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.class_objective import mean_scores, total_scores
from prompt_tuning.losses.output_head import AnyHead

REFERENCE_LOGPROBS = "reference_logprobs"
"""The column of each token's log-probability under a reference, in nats."""
IN_STEP, PRECOMPUTED, NONE = "in_step", "precomputed", "none"
"""Values of a `reference` that are not the directory of a run."""


class StoredReference(NamedTuple):
    """A reference with log-probabilities computed before the first step.

    Attributes:
      model: the frozen model, alone or with another run's adapters.
    """

    model: objective.TeacherModel


Reference = objective.TeacherModel | StoredReference


class AnswerScores(NamedTuple):
    """Log-probabilities of both answers of each example, in nats.

    Attributes:
      totals: sum over the tokens of each answer.
      means: mean over its tokens.
    """

    totals: Float[Array, "E 2"]
    means: Float[Array, "E 2"]

    def __sub__(self, other: "AnswerScores") -> "AnswerScores":
        """Returns the log-ratios to another model's probabilities."""
        return AnswerScores(self.totals - other.totals, self.means - other.means)


def score_answers(
    hidden: Float[Array, "R m D"], head: AnyHead, batch: Batch
) -> AnswerScores:
    """Scores both answers of each example, in the `R = 2 * E` rows of a batch."""
    return _scores_of(objective.target_losses(hidden, head, batch).nll, batch)


def _scores_of(nll: Float[Array, "R m"], batch: Batch) -> AnswerScores:
    weights = batch.loss_weights
    return AnswerScores(
        total_scores(nll, weights).reshape(-1, 2),
        mean_scores(nll, weights).reshape(-1, 2),
    )


def lead(scores: Float[Array, "E 2"]) -> Float[Array, "E"]:
    """Returns how much higher each chosen answer scores than the rejected one."""
    return scores[:, 0] - scores[:, 1]


def smoothed_sigmoid_loss(
    lead: Float[Array, "E"], smoothing: float | int
) -> Float[Array, "E"]:
    """Computes `-(1 - s) log sigmoid(lead) - s log sigmoid(-lead)`."""
    right, wrong = jax.nn.log_sigmoid(lead), jax.nn.log_sigmoid(-lead)
    return -(1 - smoothing) * right - smoothing * wrong


class AnswerObjective(objective.Objective):
    """An objective over answers; its accuracy is the share of positive leads."""

    @abc.abstractmethod
    def outcomes(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None,
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns each example's loss, and its lead, which is positive if right."""

    def sums(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> objective.LossSums:
        """Computes the sums of a batch over its examples; see `Objective`.

        Examples that only fill the batch have weight 0.
        """
        losses, leads = self.outcomes(hidden, head, batch, parameters)
        weights = jnp.asarray(batch.example_weights)
        return objective.sum_losses(losses, weights, weights, leads > 0)

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """Computes the total weight of the examples of a whole batch."""
        return jnp.sum(jnp.asarray(batch.example_weights))


class PreferenceObjective(AnswerObjective):
    """An objective that compares the two answers of each pair.

    Attributes:
      reference: the model whose probabilities theirs are divided by, or None.
    """

    reference: "Reference | None" = None

    @property
    def compares_answers(self) -> bool:
        """True: data have a chosen and a rejected answer to each prompt."""
        return True

    @abc.abstractmethod
    def pair_losses(
        self, scores: AnswerScores
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns the loss of each pair, and the lead of its chosen answer."""

    def outcomes(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None,
    ) -> tuple[Float[Array, "E"], Float[Array, "E"]]:
        """Returns the loss of each pair, and the lead of its chosen answer."""
        ratios = log_ratios(self.reference, hidden, head, batch, parameters)
        return self.pair_losses(ratios)


def open_reference(kind: str, open_teacher: objective.OpenTeacher) -> Reference | None:
    """Opens a reference.

    `kind` is `IN_STEP` or `PRECOMPUTED` for the frozen model, `NONE`, or a run's
    directory.
    """
    if kind == NONE:
        return None
    if kind == IN_STEP:
        return open_teacher()
    return StoredReference(open_teacher(run=None if kind == PRECOMPUTED else kind))


def log_ratios(
    reference: Reference | None,
    hidden: Float[Array, "R m D"],
    head: AnyHead,
    batch: Batch,
    parameters: Parameters | None,
) -> AnswerScores:
    """Scores answers by the ratio of their probabilities to a reference's.

    Without a reference, by the probability itself. A stored reference is read from the
    batch.

    Raises:
      ValueError: if the parameters are not given.
    """
    scores = score_answers(hidden, head, batch)
    if reference is None:
        return scores
    if isinstance(reference, StoredReference):
        stored = -jnp.asarray(batch.columns[REFERENCE_LOGPROBS])
        return scores - _scores_of(stored, batch)
    if parameters is None:
        raise ValueError("a reference runs on the model's parameters: pass them")
    with jax.named_scope("reference"):
        frozen = score_answers(reference.hidden(parameters, batch), head, batch)
    return scores - jax.lax.stop_gradient(frozen)
