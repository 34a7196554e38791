"""What training descends: a loss of tokens, or of the classes of an example.

An objective that needs a second model is in `training.distillation`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.class_scores import (
    class_cross_entropy,
    class_hinge,
    mean_scores,
    total_scores,
)
from prompt_tuning.losses.cross_entropy import TokenLoss, token_loss
from prompt_tuning.losses.normalizers import NORMALIZERS, Normalizer, constant


class LossSums(NamedTuple):
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


@runtime_checkable
class Objective(Protocol):
    """What a step descends: a sum over the batch, and what it is divided by."""

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: Float[Array, "V D"],
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """What a batch, or a micro-batch, adds up to.

        Args:
          hidden: what predicts the targets at `batch.loss_positions`.
          head: the output head.
          batch: without an accumulation axis.
          parameters: all of the model's, of use where a teacher runs beside it.
        """
        ...

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """What turns the sum of a whole batch's losses into the loss.

        Args:
          batch: with an accumulation axis, all of its micro-batches.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TokenObjective:
    """The cross-entropy of each target token, summed with the weights of the data.

    Attributes:
      z_loss: weight of `log(Z)**2`; see `token_loss`.
      label_smoothing: from 0 to below 1; see `token_loss`.
      normalizer: what the weighted sum is divided by, as T5X names it:
        "num_real_target_tokens" (the sum of the weights), "num_total_target_tokens"
        (all targets, padding included but for rows that only fill a batch),
        "average_per_sequence" (each sequence's mean, averaged; in packed rows of each
        example), a number, or None for the plain sum.
      soft_cap: what no logit exceeds, or None; see `token_loss`. It is of this loss
        alone: evaluation and generation read the model's own logits.

    Raises:
      InputError: if a number is out of range, or no normalizer has that name.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    normalizer: str | float | None = "num_real_target_tokens"
    soft_cap: float | None = None

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
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise InputError(
                f"TokenObjective.soft_cap is {self.soft_cap}, expected a finite number "
                "above 0, such as 30.0, or None"
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
        self,
        hidden: Float[Array, "B m D"],
        head: Float[Array, "V D"],
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """What a batch adds up to; see `Objective`."""
        del parameters
        cap = None if self.soft_cap is None else float(self.soft_cap)
        outcome = target_losses(
            hidden, head, batch, float(self.z_loss), float(self.label_smoothing), cap
        )
        return token_sums(outcome, self._normalizer.weights(batch), batch)

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """What the sum is divided by, which the normaliser says."""
        return self._normalizer.divisor(batch)


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
    """Each token's cross-entropy times its advantage: REINFORCE on texts at hand.

    Its gradient is that of minus the expected advantage where the model itself wrote
    the texts (Williams 1992, with a baseline in the advantage): what did better than
    expected becomes likelier, what did worse less likely. The data says the advantages
    (`DataSource.advantages_key`). Their weighted sum is divided by the sum of the
    weights.
    """

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: Float[Array, "V D"],
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """What a batch adds up to; see `Objective`."""
        del parameters
        outcome = target_losses(hidden, head, batch)
        return token_sums(outcome, advantage_weights(batch), batch)

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """The sum of the weights, advantages aside."""
        return jnp.sum(batch.loss_weights)


NO_ADVANTAGES = (
    "PolicyGradient needs advantages, and the data does not say them: set "
    "DataSource.advantages_key to a jsonl key or an HDF5 data set (or that of the "
    "training data alone, train/DataSource.advantages_key)"
)


def advantage_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """The weight of each learned position times its advantage.

    Raises:
      InputError: if the data does not say the advantages.
    """
    if batch.advantages is None:
        raise InputError(NO_ADVANTAGES)
    return batch.loss_weights * batch.advantages


def token_sums(
    outcome: TokenLoss, factors: Float[Array, "B m"], batch: Batch
) -> LossSums:
    """What the outcomes at a batch's learned positions add up to.

    Args:
      outcome: at each of them.
      factors: what each loss is multiplied with.
      batch: gives the weights.
    """
    weights = batch.loss_weights
    return LossSums(
        jnp.sum(factors * outcome.nll),
        jnp.sum(weights),
        jnp.sum(weights * outcome.correct),
    )


CLASS_LOSSES = ("cross_entropy", "hinge")


@dataclasses.dataclass(frozen=True)
class ClassObjective:
    """The loss of an example's class among `C`, each scored by its verbalizer.

    Each example comes as `C` rows that follow each other, one for each class. The loss
    is averaged over examples, by their weights where the data says some.

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
        self,
        hidden: Float[Array, "R m D"],
        head: Float[Array, "V D"],
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """What a batch adds up to; see `Objective`.

        The rows are `R = B * C`, the classes of one example after the other.
        """
        del parameters
        outcome = target_losses(hidden, head, batch)
        score = mean_scores if self.length_normalize else total_scores
        scores = score(outcome.nll, batch.loss_weights).reshape(len(batch.gold), -1)
        weights = self._weights(batch)
        losses = self._class_loss()(scores, jnp.maximum(batch.gold, 0))
        return LossSums(
            jnp.sum(weights * losses),
            jnp.sum(weights),
            jnp.sum(weights * (scores.argmax(axis=-1) == batch.gold)),
        )

    def _weights(self, batch: Batch) -> Float[Array, "*lead"]:
        """What each example weighs; nothing where there is none."""
        if batch.example_weights is not None:
            return jnp.asarray(batch.example_weights)
        return jnp.asarray(batch.gold >= 0, jnp.float32)

    def _class_loss(self) -> Callable[[Array, Array], Array]:
        if self.loss == "hinge":
            return functools.partial(class_hinge, margin=float(self.hinge))
        return class_cross_entropy

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """What the examples of a whole batch weigh; filling rows nothing."""
        return jnp.sum(self._weights(batch))


NATS_PER_WEIGHT = TokenObjective()
"""Plain cross-entropy, averaged by weight: what evaluation measures."""


def target_losses(
    hidden: Float[Array, "B m D"],
    head: Float[Array, "V D"],
    batch: Batch,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
) -> TokenLoss:
    """The outcome at each of `batch.loss_positions`; see `token_loss`."""
    targets = learned_targets(batch)
    return token_loss(hidden, head, targets, z_loss, label_smoothing, soft_cap)


def learned_targets(batch: Batch) -> Int[Array, "B m"]:
    """The targets at `batch.loss_positions`."""
    return jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)


def by_target(values: Float[Array, "*lead m"], batch: Batch) -> Float[Array, "*lead U"]:
    """Puts what belongs to the learned positions at their targets, 0 at all others.

    Args:
      values: at each of `batch.loss_positions`; what a row has where it has fewer of
        them is left out.
      batch: with or without an accumulation axis.
    """
    length = batch.targets.shape[-1]

    def row(values, positions):
        return jnp.zeros(length, values.dtype).at[positions].set(values, mode="drop")

    # Places of no weight are past the end, so that none hides the learned target 0.
    positions = jnp.where(batch.loss_weights != 0, batch.loss_positions, length)
    return jnp.vectorize(row, signature="(m),(m)->(u)")(values, positions)


@dataclasses.dataclass(frozen=True)
class ContextDistillation:
    """Descends from what the frozen model says to what it says behind a text.

    The loss of a position is `KL(teacher || student)` over the whole vocabulary, in
    nats. Positions and weights are the data's, whose tokens both read.

    Attributes:
      context: the text that the teacher reads before each row, behind the row's BOS.
    """

    context: str

    def __post_init__(self):
        check_fields(self)
        if not self.context:
            raise InputError(
                "ContextDistillation.context is empty: give the text that the prompt "
                "is to stand for"
            )
