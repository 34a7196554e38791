"""What logits cost at each position, and its slope; pure functions of some logits.

Each loss comes with its gradient with respect to the logits, in a form that needs no
automatic differentiation, so that both are worked out while the logits exist.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.sharding.collectives import VocabularyShard

MASKED_LOGIT = -1e30
"""The logit of a place of a divided vocabulary that is no token."""


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """What a loss is made of besides the cross-entropy; Python numbers alone.

    Attributes:
      z_loss: weight of `log(Z)**2`.
      label_smoothing: what the target token leaves to all others.
      soft_cap: what no logit exceeds; None for no end.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    soft_cap: float | None = None

    def cap(self, logits: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
        """The logits, by the soft cap `c` within `c * tanh(logits / c)`."""
        if self.soft_cap is None:
            return logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def cap_gradient(
        self, slope: Float[Array, "*lead V"], capped: Float[Array, "*lead V"]
    ) -> Float[Array, "*lead V"]:
        """A gradient at the capped logits as one at those before the cap."""
        if self.soft_cap is None:
            return slope
        # At places of no token, where nothing is capped, the slope is 0.
        return slope * (1 - jnp.minimum(jnp.square(capped / self.soft_cap), 1))


class LogitShard(NamedTuple):
    """The capped logits of some positions, and the log of their softmax's sum.

    Attributes:
      logits: of the tokens in `columns`; on a mesh these are a device's `v` of all `V`,
        and what is said of the whole vocabulary is added up among the devices.
      normaliser: of the whole vocabulary.
      columns: which tokens these are.
    """

    logits: Float[Array, "*lead v"]
    log_normalizer: Float[Array, "*lead"]
    columns: VocabularyShard

    @classmethod
    def from_logits(
        cls, logits: Float[Array, "*lead v"], columns: VocabularyShard
    ) -> "LogitShard":
        """Those of logits that are capped already."""
        if columns.padded:
            logits = jnp.where(columns.ids < columns.total, logits, MASKED_LOGIT)
        if columns.whole:
            return cls(logits, jax.nn.logsumexp(logits, axis=-1), columns)
        most = columns.max(logits)
        total = columns.sum(jnp.exp(logits - most[..., None]))
        return cls(logits, jnp.log(total) + most, columns)

    @property
    def softmax(self) -> Float[Array, "*lead v"]:
        """What the model says of each token."""
        return jnp.exp(self.logits - self.log_normalizer[..., None])


def target_logits(
    scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """The logit of each target."""
    logits, columns = scores.logits, scores.columns
    if columns.whole:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    place = targets - columns.first
    found = jnp.take_along_axis(logits, place[..., None], axis=-1, mode="clip")
    own = (place >= 0) & (place < columns.count)
    return columns.sum(jnp.where(own[..., None], found, 0))


def is_highest(
    scores: LogitShard, targets: Int[Array, "*lead"]
) -> Bool[Array, "*lead"]:
    """Whether no token scores higher than the target."""
    return target_logits(scores, targets) >= scores.columns.max(scores.logits)


def token_cost(
    terms: LossTerms, scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """The cross-entropy of the targets with its terms; see `token_loss`."""
    logits, normaliser, columns = scores
    loss = normaliser - target_logits(scores, targets)
    if terms.label_smoothing:
        high, low = _smoothed(terms, columns.total)
        apart = normaliser[..., None] - logits
        if columns.padded:
            apart = jnp.where(columns.ids < columns.total, apart, 0)
        spread = columns.sum(apart)
        entropy = _entropy(high, low, columns.total)
        loss = (high - low) * loss + low * spread - entropy
    if terms.z_loss:
        loss = loss + terms.z_loss * jnp.square(normaliser)
    return loss


def token_cost_gradient(
    terms: LossTerms, scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead V"]:
    """The gradient of `token_cost`: the softmax, less what the target asks for.

    The z-loss scales the softmax by `1 + 2 * z_loss * log(Z)`.
    """
    logits, _, columns = scores
    hit = columns.ids == targets[..., None]
    wanted = hit.astype(logits.dtype)
    if terms.label_smoothing:
        wanted = jnp.where(hit, *_smoothed(terms, columns.total))
    said = scores.softmax
    if terms.z_loss:
        said = said * (1 + 2 * terms.z_loss * scores.log_normalizer)[..., None]
    excess = said - wanted
    if columns.padded:
        excess = jnp.where(columns.ids < columns.total, excess, 0)
    return excess


def divergence(student: LogitShard, teacher: LogitShard) -> Float[Array, "*lead"]:
    """`KL(teacher || student)` over the vocabulary, in nats.

    Forward, so that the student has to cover all that the teacher says (Hinton et al.
    2015, section 2, at temperature 1, less the teacher's entropy).
    """
    apart = teacher.logits - student.logits
    expected = teacher.columns.sum(teacher.softmax * apart)
    return expected - teacher.log_normalizer + student.log_normalizer


def divergence_gradient(
    student: LogitShard, teacher: LogitShard
) -> Float[Array, "*lead V"]:
    """The gradient of `divergence` at the student's logits."""
    return student.softmax - teacher.softmax


def _smoothed(terms: LossTerms, width: int) -> tuple[float, float]:
    """What is asked of the target token, and of each other one."""
    return 1 - terms.label_smoothing, terms.label_smoothing / (width - 1)


def _entropy(high: float, low: float, width: int) -> float:
    """Of the smoothed target, in nats, with T5X's guard of the logarithm."""
    return -(high * math.log(high) + (width - 1) * low * math.log(low + 1e-20))
