"""What a sum of token losses is divided by: the three ways of T5X, and a constant.

The sum and what divides it follow from the weights of a batch alone, so a batch that
comes in micro-batches is divided by what belongs to it as a whole.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """How the losses of a batch become one.

    Attributes:
      weights: gives what each loss is multiplied with, `[..., B, m]`.
      divisor: gives what their sum is divided by. Of a batch with an accumulation axis
        it is that of all micro-batches together.
    """

    weights: Callable[[Batch], Float[Array, "*lead m"]]
    divisor: Callable[[Batch], Float[Array, ""] | float]


def data_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """The weights that the data gives."""
    return batch.loss_weights


def weight_sum(batch: Batch) -> Float[Array, ""]:
    """The sum of the weights: the real targets, where each weighs one."""
    return jnp.sum(batch.loss_weights)


def target_count(batch: Batch) -> Float[Array, ""] | float:
    """All targets that the rows have room for, padding included: `B * U`.

    A row that only fills the batch has none, so it is the same on any mesh.
    """
    if batch.real_rows is None:
        return float(math.prod(batch.targets.shape))
    return jnp.sum(batch.real_rows) * float(batch.targets.shape[-1])


def sequence_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """The weights over the sum that each sequence has of them.

    A sequence is a row, and in packed rows one example of it.
    """
    weights = jnp.asarray(batch.loss_weights)
    sums = jnp.sum(weights, axis=-1, keepdims=True)
    segment_ids = batch.segment_ids
    if batch.target_segment_ids is not None:
        segment_ids = batch.target_segment_ids
    if segment_ids is not None:
        segments = jnp.take_along_axis(segment_ids, batch.loss_positions, axis=-1)
        same = segments[..., None] == segments[..., None, :]
        sums = jnp.sum(same * weights[..., None, :], axis=-1)
    return jnp.where(weights == 0, 0, weights / jnp.where(sums == 0, 1, sums))


def sequence_count(batch: Batch) -> Float[Array, ""]:
    """The sequences that carry weight."""
    return jnp.sum(sequence_weights(batch))


def constant_normalizer(number: float) -> Normalizer:
    """Divides the weighted sum by the same number whatever the batch."""
    return Normalizer(data_weights, lambda batch: number)


TOTAL_TARGETS = "num_total_target_tokens"
NORMALIZERS = {
    "num_real_target_tokens": Normalizer(data_weights, weight_sum),
    TOTAL_TARGETS: Normalizer(data_weights, target_count),
    "average_per_sequence": Normalizer(sequence_weights, sequence_count),
}
"""By the names that T5X gives them (`losses.SpecialLossNormalizingFactor`)."""
