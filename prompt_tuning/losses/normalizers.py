"""Divisors for a sum of token losses: T5X's three, and a constant.

A loss's factor and the divisor depend only on a batch's weights, so micro-batches get
the same divisor as the whole batch.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """How the losses of a batch are combined into one.

    Attributes:
      weights: computes the factor of each loss, `[..., B, m]`.
      divisor: computes the divisor of their sum. For a batch with an accumulation axis
        it covers all micro-batches together.
    """

    weights: Callable[[Batch], Float[Array, "*lead m"]]
    divisor: Callable[[Batch], Float[Array, ""] | float]


def data_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """Returns the loss weights of the data."""
    return batch.loss_weights


def weight_sum(batch: Batch) -> Float[Array, ""]:
    """Sums the weights; counts the learned targets if each has weight 1."""
    return jnp.sum(batch.loss_weights)


def target_count(batch: Batch) -> Float[Array, ""] | float:
    """Counts all targets of the real rows, padding included: `B * U`.

    Rows that only fill the batch do not count, so the result is the same on every mesh.
    """
    if batch.real_rows is None:
        return float(math.prod(batch.targets.shape))
    return jnp.sum(batch.real_rows) * float(batch.targets.shape[-1])


def sequence_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """Divides each weight by the sum of the weights in its sequence.

    A sequence is a row, or a segment of a packed row.
    """
    weights = jnp.asarray(batch.loss_weights)
    sums = jnp.sum(weights, axis=-1, keepdims=True)
    segment_ids = batch.segment_ids
    if batch.target_segment_ids is not None:
        segment_ids = batch.target_segment_ids
    if segment_ids is not None:
        # [..., B, m]: segment of each learned position
        segments = jnp.take_along_axis(segment_ids, batch.loss_positions, axis=-1)
        same = segments[..., None] == segments[..., None, :]  # [..., B, m, m]
        sums = jnp.sum(same * weights[..., None, :], axis=-1)
    return jnp.where(weights == 0, 0, weights / jnp.where(sums == 0, 1, sums))


def sequence_count(batch: Batch) -> Float[Array, ""]:
    """Counts the sequences with learned targets."""
    return jnp.sum(sequence_weights(batch))


def constant_normalizer(number: float | int) -> Normalizer:
    """Returns a normalizer that divides every batch by the same number."""
    return Normalizer(data_weights, lambda batch: number)


TOTAL_TARGETS = "num_total_target_tokens"
NORMALIZERS = {
    "num_real_target_tokens": Normalizer(data_weights, weight_sum),
    TOTAL_TARGETS: Normalizer(data_weights, target_count),
    "average_per_sequence": Normalizer(sequence_weights, sequence_count),
}
"""Normalizers by their T5X names (`losses.SpecialLossNormalizingFactor`)."""
