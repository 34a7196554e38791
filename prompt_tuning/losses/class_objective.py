"""Loss over an example's classes, each scored by the text of its label.

The score is the log-probability of the text; the highest one is the answer.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeNumber
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.output_head import AnyHead


def total_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Log-probability of each row's targets in nats: minus the weighted NLL."""
    return -jnp.sum(weights * nll, axis=-1)


def mean_scores(
    nll: Float[Array, "*lead m"], weights: Float[Array, "*lead m"]
) -> Float[Array, "*lead"]:
    """Mean log-probability by weight, which does not penalize long labels."""
    total = jnp.sum(weights, axis=-1)  # [*lead]
    # Filling rows have no weight; a divisor of 1 avoids 0 / 0.
    return total_scores(nll, weights) / jnp.where(total == 0, 1, total)


def class_cross_entropy(
    scores: Float[Array, "B C"], gold: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Cross-entropy of the softmax over the classes, in nats."""
    return jax.nn.logsumexp(scores, axis=-1) - _gold_scores(scores, gold)


def class_hinge(
    scores: Float[Array, "B C"], gold: Int[Array, "B"], margin: float | int
) -> Float[Array, "B"]:
    """Returns how far the gold class falls short of leading by a margin, at least 0.

    The multi-class hinge loss `max(0, margin + max_{c != gold} s_c - s_gold)` (Crammer
    and Singer 2001). google-research/prompt-tuning's perceptron loss includes the gold
    class in the maximum: there, an example in which the gold class leads by any amount
    costs the constant `margin` and has no gradient.
    """
    # [B]: highest score among the wrong classes
    best_wrong = jnp.where(_is_gold(scores, gold), -jnp.inf, scores).max(axis=-1)
    return jax.nn.relu(margin + best_wrong - _gold_scores(scores, gold))


def _is_gold(scores: Array, gold: Array) -> Bool[Array, "B C"]:
    return jnp.arange(scores.shape[-1]) == gold[..., None]


def _gold_scores(scores: Array, gold: Array) -> Float[Array, "B"]:
    return jnp.sum(jnp.where(_is_gold(scores, gold), scores, 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class ClassObjective(Objective):
    """Loss over the `C` classes of an example; the model scores the text of each.

    Prefer it to `TokenObjective` for classification: it compares the labels with each
    other instead of with the whole vocabulary. Each example is read as `C` rows, one
    per label, so a step costs `C` times as much. The loss is averaged over the
    examples, using the data's example weights if there are any.

    Attributes:
      labels: texts of the classes; the completion of each example is one of them.
      loss: "cross_entropy" of the scores, or "hinge".
      hinge: margin of the hinge loss, in nats.
      length_normalize: whether a score is the (weighted) mean of its tokens'
        log-probabilities instead of their sum.

    Raises:
      InputError: if there are fewer than two labels, two are equal, or another setting
        is out of range.

    Examples:
      >>> reviews = [("good: ", "yes"), ("awful: ", "no")] * 4
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     reviews,
      ...     objective=pt.ClassObjective(labels=["yes", "no"]),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.predict("good: ").label in ("yes", "no")
      True
    """

    labels: Sequence[str]
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy"
    hinge: NonnegativeNumber = 0.2
    length_normalize: bool = True

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.labels, str) or not isinstance(self.labels, Sequence):
            raise InputError(
                f"ClassObjective.labels is {shown(self.labels)}, expected a list of "
                "texts"
            )
        # A tuple, because a compiled step needs a hashable objective.
        object.__setattr__(self, "labels", tuple(self.labels))
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise InputError(
                f"ClassObjective.labels are {list(self.labels)}, expected two or more, "
                "all different"
            )

    @property
    def candidate_labels(self) -> tuple[str, ...]:
        """The labels: every example is read with each as its completion."""
        return tuple(self.labels)

    def sums(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch; see `Objective`.

        Of the `R = B * C` rows, `C` consecutive ones are the classes of an example.
        """
        del parameters
        token_losses = objective.target_losses(hidden, head, batch)
        score = mean_scores if self.length_normalize else total_scores
        # One score a row, [B * C], and the classes of an example are consecutive rows.
        scores = score(token_losses.nll, batch.loss_weights)
        scores = scores.reshape(len(batch.gold), -1)  # [B, C]
        weights = self._weights(batch)
        # A filling example has gold -1 and weight 0; any class will do for it.
        losses = self._class_loss()(scores, jnp.maximum(batch.gold, 0))
        correct = scores.argmax(axis=-1) == batch.gold
        return objective.sum_losses(losses, weights, weights, correct)

    def _weights(self, batch: Batch) -> Float[Array, "*lead"]:
        """Weights of the examples, 0 for those that only fill the batch."""
        if batch.example_weights is not None:
            return jnp.asarray(batch.example_weights)
        return jnp.asarray(batch.gold >= 0, jnp.float32)

    def _class_loss(self) -> Callable[[Array, Array], Array]:
        if self.loss == "hinge":
            return functools.partial(class_hinge, margin=float(self.hinge))
        return class_cross_entropy

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """Computes the total weight of the examples of a whole batch."""
        return jnp.sum(self._weights(batch))
