"""What training descends: a loss of tokens, or of the classes of an example."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.data.batches import Batch
from prompt_tuning.errors import InputError
from prompt_tuning.losses.class_scores import (
    class_cross_entropy,
    class_hinge,
    mean_scores,
    total_scores,
)
from prompt_tuning.losses.cross_entropy import TokenLoss, token_loss
from prompt_tuning.losses.normalizers import NORMALIZERS, Normalizer, constant
from prompt_tuning.settings import check_fields


class Sums(NamedTuple):
    """What a batch adds up to; sums, so that batches of any weight can be added.

    Attributes:
      loss: what is descended, weighted; in nats.
      weight: the weights: of tokens, or one for each example with classes.
      correct: the weights of the tokens, or examples, whose target scored highest.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    correct: Float[Array, ""]

    @property
    def accuracy(self) -> Float[Array, ""]:
        """The share that scored highest, by weight."""
        return self.correct / self.weight


@dataclasses.dataclass(frozen=True)
class TokenObjective:
    """The cross-entropy of each target token, summed with the weights of the data.

    Attributes:
      z_loss: weight of `log(Z)**2`; see `token_loss`.
      label_smoothing: from 0 to below 1; see `token_loss`.
      normalizer: what the weighted sum is divided by, as T5X names it:
        "num_real_target_tokens" (the sum of the weights), "num_total_target_tokens"
        (all targets, padding included), "average_per_sequence" (each sequence's mean,
        averaged; in packed rows of each example), a number, or None for the plain sum.

    Raises:
      InputError: if a number is out of range, or no normalizer has that name.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    normalizer: str | float | None = "num_real_target_tokens"

    def __post_init__(self):
        check_fields(self)
        if not 0 <= self.z_loss < math.inf:
            raise InputError(
                f"TokenObjective.z_loss is {self.z_loss}, expected a finite number of "
                "0 or more, such as 1e-4"
            )
        if not 0 <= self.label_smoothing < 1:
            raise InputError(
                f"TokenObjective.label_smoothing is {self.label_smoothing}, expected a "
                "number from 0 to below 1, such as 0.1"
            )
        self._check_normalizer()

    def _check_normalizer(self) -> None:
        chosen = self.normalizer
        if chosen is None or (isinstance(chosen, str) and chosen in NORMALIZERS):
            return
        if isinstance(chosen, str) or not 0 < chosen < math.inf:
            raise InputError(
                f"TokenObjective.normalizer is {chosen!r}, expected one of "
                f"{', '.join(NORMALIZERS)}, a number above 0, or None for the sum"
            )

    @property
    def _normalizer(self) -> Normalizer:
        if isinstance(self.normalizer, str):
            return NORMALIZERS[self.normalizer]
        return constant(1.0 if self.normalizer is None else float(self.normalizer))

    def sums(
        self, hidden: Float[Array, "B m D"], head: Float[Array, "V D"], batch: Batch
    ) -> Sums:
        """What a batch, or a micro-batch, adds up to.

        Args:
          hidden: what predicts the targets at `batch.loss_positions`.
          head: the output head.
          batch: without an accumulation axis.
        """
        outcome = target_losses(
            hidden, head, batch, float(self.z_loss), float(self.label_smoothing)
        )
        weights = batch.loss_weights
        return Sums(
            jnp.sum(self._normalizer.weights(batch) * outcome.nll),
            jnp.sum(weights),
            jnp.sum(weights * outcome.correct),
        )

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """What turns the sum of a whole batch's losses into the loss.

        Args:
          batch: with an accumulation axis, all of its micro-batches.
        """
        return self._normalizer.divisor(batch)


CLASS_LOSSES = ("cross_entropy", "hinge")


@dataclasses.dataclass(frozen=True)
class ClassObjective:
    """The loss of an example's class among `C`, each scored by its verbalizer.

    Each example comes as `C` rows that follow each other, one for each class. The loss
    is averaged over examples.

    Attributes:
      labels: the verbalizers of the classes; each example's completion is one of them.
      loss: "cross_entropy" over the scores, or "hinge"; see `class_hinge`.
      hinge: the margin of the hinge loss, in nats.
      length_normalize: whether a score is the mean of its tokens' log-probabilities
        (their weighted sum over the weights) and not the sum.

    Raises:
      InputError: if there are not two labels or more, all different, or another
        setting is out of range.
    """

    labels: Sequence[str]
    loss: str = "cross_entropy"
    hinge: float = 0.2
    length_normalize: bool = True

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.labels, str) or not isinstance(self.labels, Sequence):
            raise InputError(
                f"ClassObjective.labels is {self.labels!r}, expected a list of texts"
            )
        # A tuple, so that an objective can be told from others, and hashed.
        object.__setattr__(self, "labels", tuple(self.labels))
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise InputError(
                f"ClassObjective.labels are {list(self.labels)}, expected two or more, "
                "all different"
            )
        if self.loss not in CLASS_LOSSES:
            raise InputError(
                f"ClassObjective.loss is {self.loss!r}, expected one of "
                f"{', '.join(CLASS_LOSSES)}"
            )
        if not 0 <= self.hinge < math.inf:
            raise InputError(
                f"ClassObjective.hinge is {self.hinge}, expected a finite number of 0 "
                "or more, such as 0.2"
            )

    def sums(
        self, hidden: Float[Array, "R m D"], head: Float[Array, "V D"], batch: Batch
    ) -> Sums:
        """What a batch, or a micro-batch, adds up to; arguments as `TokenObjective`'s.

        The rows are `R = B * C`, the classes of one example after the other.
        """
        outcome = target_losses(hidden, head, batch)
        score = mean_scores if self.length_normalize else total_scores
        scores = score(outcome.nll, batch.loss_weights).reshape(len(batch.gold), -1)
        real = batch.gold >= 0
        losses = self._class_loss()(scores, jnp.maximum(batch.gold, 0))
        return Sums(
            jnp.sum(real * losses),
            jnp.sum(real, dtype=jnp.float32),
            jnp.sum(real & (scores.argmax(axis=-1) == batch.gold), dtype=jnp.float32),
        )

    def _class_loss(self) -> Callable[[Array, Array], Array]:
        if self.loss == "hinge":
            return functools.partial(class_hinge, margin=float(self.hinge))
        return class_cross_entropy

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """The examples of a whole batch; filling rows are none."""
        return jnp.sum(batch.gold >= 0, dtype=jnp.float32)


Objective = TokenObjective | ClassObjective

NATS_PER_WEIGHT = TokenObjective()
"""Plain cross-entropy, averaged by weight: what evaluation measures."""


def target_losses(
    hidden: Float[Array, "B m D"],
    head: Float[Array, "V D"],
    batch: Batch,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> TokenLoss:
    """The outcome at each of `batch.loss_positions`; see `token_loss`."""
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    return token_loss(hidden, head, targets, z_loss, label_smoothing)
