"""What each target token costs, and whether it scored highest."""

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
    """The outcome at every target that carries weight, example after example.

    Attributes:
      examples: how many there are, `E`.
      example: of which example each target is, `[t]`.
      weight: of its loss, `[t]`.
      nll: its negative log likelihood in nats, `[t]`.
      correct: whether no token scored higher, `[t]`.
    """

    examples: int
    example: Int[np.ndarray, "t"]
    weight: Float[np.ndarray, "t"]
    nll: Float[np.ndarray, "t"]
    correct: Bool[np.ndarray, "t"]

    def metrics(
        self, chosen: Bool[np.ndarray, "t"] | None = None
    ) -> dict[str, MetricSums]:
        """Loss, perplexity and accuracy, of all targets or of the chosen ones.

        An example without a chosen target adds nothing.
        """
        weight = self.weight if chosen is None else self.weight * chosen
        weights = self._sums(weight)
        nats = np.stack([self._sums(weight * self.nll), weights], axis=1)
        right = np.stack([self._sums(weight * self.correct), weights], axis=1)
        return {
            "loss": MetricSums(nats, ratio, lower_is_better=True),
            "perplexity": MetricSums(nats, exponential_ratio, lower_is_better=True),
            "accuracy": MetricSums(right, ratio),
        }

    def _sums(self, values: Float[np.ndarray, "t"]) -> Float[np.ndarray, "E"]:
        return np.bincount(self.example, values, minlength=self.examples)


def measure_tokens(
    model: PromptedModel, parameters: Parameters, examples: Examples, plan: BatchPlan
) -> TokenOutcomes:
    """Reads every example once.

    Args:
      model: of which graph and config are used.
      parameters: all that are in memory, by path.
      examples: what the plan's rows are numbers of.
      plan: one pass over all of them.
    """
    counts = examples.weight_counts
    starts = np.cumsum(counts) - counts
    # Weight, nats, and whether it is right.
    found = np.zeros((3, int(counts.sum())))
    batches = stream_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
    )
    for index, batch in enumerate(batches):
        outcome = jax.device_get(score_batch(token_losses, model, parameters, batch))
        arrays = np.stack([batch.loss_weights, outcome.nll, outcome.correct])
        rows = plan.batch(index).rows
        for place, row in enumerate(rows.reshape(len(rows), -1).tolist()):
            at = 0
            for number in (number for number in row if number != FILLING):
                start, count = int(starts[number]), int(counts[number])
                own = arrays[:, place, at : at + count]
                found[:, start : start + count] = own
                at += count
    example = np.repeat(np.arange(len(examples)), counts)
    return TokenOutcomes(
        len(examples), example, found[0], found[1], found[2].astype(bool)
    )
