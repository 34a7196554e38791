"""Losses of the logits at each position, with their gradients, as pure functions.

Each loss comes with its gradient with respect to the logits in closed form, so that
both can be computed while the logits exist, without automatic differentiation.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.losses.output_head import soft_capped
from prompt_tuning.settings.distillation_settings import DivergenceKind
from prompt_tuning.sharding.collectives import VocabularyShard

LEAST_MASS = 1e-6
"""Minimum probability of all tokens that are not kept, so that its logarithm is."""
MASKED_LOGIT = -1e30
"""Logit of a column that only pads a sharded vocabulary."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How to compare a student's distribution `s` with its teacher's, `t`.

    With the mixture `m = (1 - beta) s + beta t`, the divergences are

        forward: KL(t || s)
        reverse: KL(s || t)
        jsd:     beta KL(t || m) + (1 - beta) KL(s || m)

    The last is the generalized Jensen-Shannon divergence (Agarwal et al. 2024,
    "On-policy distillation of language models", equation 1).

    Attributes:
      kind: "forward", "reverse" or "jsd".
      beta: weight of the teacher in the mixture, above 0 and below 1; only for "jsd".
    """

    kind: DivergenceKind = "forward"
    beta: float = 0.5


FORWARD = Divergence()


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """Terms added to the cross-entropy, as Python numbers.

    Attributes:
      z_loss: weight of `log(Z)**2`.
      label_smoothing: probability that the target token leaves to all other tokens.
      soft_cap: bound on the absolute value of the logits; None for no bound.
      divergence: replaces the cross-entropy if there is a teacher.
      of_classes: whether the logits score classes; see `OutputHead`.
    """

    z_loss: float | int = 0.0
    label_smoothing: float | int = 0.0
    soft_cap: float | int | None = None
    divergence: Divergence = FORWARD
    of_classes: bool = False

    def cap(self, logits: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
        """Applies the soft cap `c`: `c * tanh(logits / c)`."""
        return soft_capped(logits, self.soft_cap)

    def cap_gradient(
        self, gradient: Float[Array, "*lead V"], capped: Float[Array, "*lead V"]
    ) -> Float[Array, "*lead V"]:
        """Backpropagates a gradient through `cap`: times `1 - (capped / c)**2`."""
        if self.soft_cap is None:
            return gradient
        # In padding columns `capped` is MASKED_LOGIT; the minimum makes the factor 0.
        return gradient * (1 - jnp.minimum(jnp.square(capped / self.soft_cap), 1))


class LogitShard(NamedTuple):
    """Capped logits at some positions, with the log of their softmax's sum.

    Attributes:
      logits: logits of the tokens in `columns`. On a mesh a device has `v` of the `V`
        columns, and sums over the vocabulary are added up across devices.
      log_normalizer: log of the softmax's sum over the whole vocabulary.
      columns: range of the vocabulary that `logits` covers.
    """

    logits: Float[Array, "*lead v"]
    log_normalizer: Float[Array, "*lead"]
    columns: VocabularyShard

    @classmethod
    def from_logits(
        cls, logits: Float[Array, "*lead v"], columns: VocabularyShard
    ) -> "LogitShard":
        """Masks padding columns and computes the normalizer of capped logits."""
        if columns.padded:
            logits = jnp.where(columns.ids < columns.total, logits, MASKED_LOGIT)
        if columns.whole:
            return cls(logits, jax.nn.logsumexp(logits, axis=-1), columns)
        # log sum exp over all devices: maximum [*lead], then sum of the shifted exp.
        maximum = columns.max(logits)
        total = columns.sum(jnp.exp(logits - maximum[..., None]))
        return cls(logits, jnp.log(total) + maximum, columns)

    @property
    def log_softmax(self) -> Float[Array, "*lead v"]:
        """Log-probability of each token in `columns`."""
        return self.logits - self.log_normalizer[..., None]

    @property
    def softmax(self) -> Float[Array, "*lead v"]:
        """Probability of each token in `columns`."""
        return jnp.exp(self.log_softmax)


class TopTargets(NamedTuple):
    """Tokens that a teacher finds likeliest at each position.

    Attributes:
      ids: their ids, int32 `[*lead, K]`.
      logprobs: their log-probabilities, float32 `[*lead, K]`; -inf for none.
    """

    ids: Int[Array, "*lead K"]
    logprobs: Float[Array, "*lead K"]


def completed(top: TopTargets, student: LogitShard) -> LogitShard:
    """Distributes the mass that a teacher's likeliest tokens lack as the student does.

    All other tokens are then one outcome: the divergence between both distributions,
    and its gradient, are those of the kept tokens and the rest of the mass. `top` has
    the teacher's tokens, `[c, K]`, and `student` the logits, `[c, v]`.
    """
    columns, rows = student.columns, jnp.arange(len(top.ids))[:, None]
    index = top.ids - columns.first
    here = jnp.isfinite(top.logprobs) & (index >= 0) & (index < columns.count)
    places = rows, jnp.where(here, index, columns.count)  # the last one is dropped
    remaining = student.logits.at[places].set(MASKED_LOGIT, mode="drop")
    rest = LogitShard.from_logits(remaining, columns).log_softmax
    left = jnp.maximum(1 - jnp.exp(top.logprobs).sum(-1), LEAST_MASS)
    logprobs = rest + jnp.log(left)[:, None]
    logprobs = logprobs.at[places].set(top.logprobs, mode="drop")
    return LogitShard(logprobs, jnp.zeros(len(logprobs)), columns)


def target_logits(
    scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """Returns the logit of each target."""
    logits, columns = scores.logits, scores.columns
    if columns.whole:
        return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    index = targets - columns.first
    picked = jnp.take_along_axis(logits, index[..., None], axis=-1, mode="clip")
    # One device holds the target; the others add 0 to the sum.
    here = (index >= 0) & (index < columns.count)
    return columns.sum(jnp.where(here[..., None], picked, 0))


def is_highest(
    scores: LogitShard, targets: Int[Array, "*lead"]
) -> Bool[Array, "*lead"]:
    """Tests whether no token scores higher than the target."""
    return target_logits(scores, targets) >= scores.columns.max(scores.logits)


def token_cost(
    terms: LossTerms, scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """Cross-entropy of the targets with all terms; see `token_loss`."""
    logits, log_normalizer, columns = scores
    loss = log_normalizer - target_logits(scores, targets)
    if terms.label_smoothing:
        high, low = _smoothed_target(terms, columns.total)
        # sum_j q_j nll_j - entropy(q), with q_target = high and q_j = low elsewhere.
        token_nll = log_normalizer[..., None] - logits  # [*lead, v]
        if columns.padded:
            token_nll = jnp.where(columns.ids < columns.total, token_nll, 0)
        total_nll = columns.sum(token_nll)
        entropy = _smoothed_entropy(high, low, columns.total)
        loss = (high - low) * loss + low * total_nll - entropy
    if terms.z_loss:
        loss = loss + terms.z_loss * jnp.square(log_normalizer)
    return loss


def token_cost_gradient(
    terms: LossTerms, scores: LogitShard, targets: Int[Array, "*lead"]
) -> Float[Array, "*lead V"]:
    """Gradient of `token_cost` with respect to the capped logits.

    It is `softmax - q` with the target distribution `q`. The z-loss scales the softmax
    by `1 + 2 * z_loss * log(Z)`.
    """
    logits, _, columns = scores
    is_target = columns.ids == targets[..., None]  # [*lead, v]
    target = is_target.astype(logits.dtype)
    if terms.label_smoothing:
        target = jnp.where(is_target, *_smoothed_target(terms, columns.total))
    softmax = scores.softmax
    if terms.z_loss:
        softmax = softmax * (1 + 2 * terms.z_loss * scores.log_normalizer)[..., None]
    gradient = softmax - target
    if columns.padded:
        gradient = jnp.where(columns.ids < columns.total, gradient, 0)
    return gradient


def divergence(
    kind: Divergence, student: LogitShard, teacher: LogitShard
) -> Float[Array, "*lead"]:
    """Computes a divergence over the vocabulary, in nats; see `Divergence`.

    The forward one makes the student cover everything that the teacher finds likely
    (Hinton et al. 2015, section 2, at temperature 1, minus the teacher's entropy). The
    reverse one makes it avoid what the teacher finds unlikely (Gu et al. 2024,
    "MiniLLM").
    """
    if kind.kind == "forward":
        return _relative_entropy(teacher, teacher.log_softmax - student.log_softmax)
    log_ratio = _log_ratio(kind, student, teacher)  # [*lead, v]
    of_student = _relative_entropy(student, log_ratio)
    if kind.kind == "reverse":
        return of_student
    to_mixture = teacher.log_softmax - student.log_softmax + log_ratio
    of_teacher = _relative_entropy(teacher, to_mixture)
    return kind.beta * of_teacher + (1 - kind.beta) * of_student


def divergence_gradient(
    kind: Divergence, student: LogitShard, teacher: LogitShard
) -> Float[Array, "*lead V"]:
    """Gradient of `divergence` with respect to the student's logits.

    For the forward divergence it is `s - t`, otherwise `w s (r - sum_j s_j r_j)`: for
    the reverse one `w = 1` and `r = log(s / t)`, for the mixture `w = 1 - beta` and `r
    = log(s / m)`. The mixture's own gradient is the same constant for all tokens, which
    a softmax cancels.
    """
    if kind.kind == "forward":
        return student.softmax - teacher.softmax
    log_ratio = _log_ratio(kind, student, teacher)  # [*lead, v]
    mean = _relative_entropy(student, log_ratio)
    weight = 1 if kind.kind == "reverse" else 1 - kind.beta
    return weight * student.softmax * (log_ratio - mean[..., None])


def _relative_entropy(
    scores: LogitShard, log_ratio: Float[Array, "*lead v"]
) -> Float[Array, "*lead"]:
    """Mean of a log-ratio under a model's distribution."""
    return scores.columns.sum(scores.softmax * log_ratio)


def _log_ratio(
    kind: Divergence, student: LogitShard, teacher: LogitShard
) -> Float[Array, "*lead v"]:
    """Logarithm of the student's probabilities over the teacher's or the mixture's."""
    difference = student.log_softmax - teacher.log_softmax
    if kind.kind == "reverse":
        return difference
    # log s - log((1 - beta) s + beta t), each divided by s
    weights = math.log1p(-kind.beta), math.log(kind.beta)
    return -jnp.logaddexp(weights[0], weights[1] - difference)


def _smoothed_target(terms: LossTerms, width: int) -> tuple[float | int, float | int]:
    """Returns the probability of the target token, and of each other token."""
    return 1 - terms.label_smoothing, terms.label_smoothing / (width - 1)


def _smoothed_entropy(high: float | int, low: float | int, width: int) -> float:
    """Entropy of the smoothed target in nats, with T5X's guard of the logarithm."""
    return -(high * math.log(high) + (width - 1) * low * math.log(low + 1e-20))
