"""Loss and correctness of every learned token of held-out examples."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.batch_scores import score_batch
from prompt_tuning.evaluation.metric_sums import MetricSums, exponential_ratio, ratio
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel


@dataclasses.dataclass(frozen=True)
class TokenOutcomes:
    """Loss and correctness of every learned token, in the order of the examples.

    Attributes:
      examples: number of examples, `E`.
      example: index of each token's example, `[t]`.
      weight: loss weight of each token, `[t]`.
      nll: negative log likelihood of each token in nats, `[t]`.
      correct: whether no other token scored higher, `[t]`.
    """

    examples: int
    example: Int[np.ndarray, "t"]
    weight: Float[np.ndarray, "t"]
    nll: Float[np.ndarray, "t"]
    correct: Bool[np.ndarray, "t"]

    def metrics(
        self, chosen: Bool[np.ndarray, "t"] | None = None
    ) -> dict[str, MetricSums]:
        """Computes loss, perplexity and accuracy of all tokens, or of the chosen ones.

        An example without chosen tokens adds nothing.
        """
        weight = self.weight if chosen is None else self.weight * chosen
        weights = self._example_sums(weight)
        # A weighted sum and the sum of the weights of each example, [E, 2]
        nats = np.stack([self._example_sums(weight * self.nll), weights], axis=1)
        right = np.stack([self._example_sums(weight * self.correct), weights], axis=1)
        return {
            "loss": MetricSums(nats, ratio, lower_is_better=True),
            "perplexity": MetricSums(nats, exponential_ratio, lower_is_better=True),
            "accuracy": MetricSums(right, ratio),
        }

    def _example_sums(self, values: Float[np.ndarray, "t"]) -> Float[np.ndarray, "E"]:
        return np.bincount(self.example, values, minlength=self.examples)


def measure_tokens(
    model: PromptedModel, parameters: Parameters, examples: Examples, plan: BatchPlan
) -> TokenOutcomes:
    """Computes the loss of every example once.

    Args:
      model: evaluated model.
      parameters: all parameters in memory, by path.
      examples: examples that the plan refers to.
      plan: one pass over all examples.
    """
    counts = examples.weight_counts
    starts = np.cumsum(counts) - counts
    # Weight, nats, and correctness of all learned tokens, [3, t]
    values = np.zeros((3, int(counts.sum())))
    batches = stream_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
    )
    for index, batch in enumerate(batches):
        losses = jax.device_get(score_batch(token_losses, model, parameters, batch))
        arrays = np.stack([batch.loss_weights, losses.nll, losses.correct])  # [3, B, m]
        rows = plan.batch(index).rows
        # A row contains the learned tokens of its segments one after the other.
        for row, segments in enumerate(rows.reshape(len(rows), -1).tolist()):
            offset = 0
            for number in (number for number in segments if number != FILLING):
                start, count = int(starts[number]), int(counts[number])
                segment = arrays[:, row, offset : offset + count]
                values[:, start : start + count] = segment
                offset += count
    example = np.repeat(np.arange(len(examples)), counts)
    return TokenOutcomes(
        len(examples), example, values[0], values[1], values[2].astype(bool)
    )
