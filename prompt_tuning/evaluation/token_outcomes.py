"""Loss and correctness of every learned token of held-out examples."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from prompt_tuning.core.compilation import abstract
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan
from prompt_tuning.data.batching.batches import read_first_batches, stream_batches
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.batch_scores import bind, compile_scores, score_batches
from prompt_tuning.evaluation.metric_sums import MetricSums, exponential_ratio, ratio
from prompt_tuning.losses.objective import HeldOutObjective
from prompt_tuning.models.scoring import held_out_losses, token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel

LOSS, CROSS_ENTROPY = "loss", "cross_entropy"
"""Names of metrics; a loss that is the cross-entropy is reported only as `loss`."""


@dataclasses.dataclass(frozen=True)
class TokenOutcomes:
    """Loss and correctness of every learned token, in the order of the examples.

    Attributes:
      examples: number of examples, `E`.
      example: index of each token's example, `[t]`.
      weight: loss weight of each token, `[t]`.
      nll: negative log likelihood of each token in nats, `[t]`.
      correct: whether no other token scored higher, `[t]`.
      objective: loss of the training objective, `[t]`; None if it is `nll`.
    """

    examples: int
    example: Int[np.ndarray, "t"]
    weight: Float[np.ndarray, "t"]
    nll: Float[np.ndarray, "t"]
    correct: Bool[np.ndarray, "t"]
    objective: Float[np.ndarray, "t"] | None = None

    @property
    def losses(self) -> Float[np.ndarray, "t"]:
        """Values behind the metric `loss`: the objective's losses, or else the nats."""
        return self.nll if self.objective is None else self.objective

    def metrics(
        self, chosen: Bool[np.ndarray, "t"] | None = None
    ) -> dict[str, MetricSums]:
        """Computes loss, perplexity and accuracy of all tokens, or of the chosen ones.

        Examples without chosen tokens add nothing.
        """
        weight = self.weight if chosen is None else self.weight * chosen
        weights = self._example_sums(weight)

        def sums(values: np.ndarray) -> Float[np.ndarray, "E 2"]:
            """Returns each example's weighted sum and sum of weights."""
            return np.stack([self._example_sums(weight * values), weights], axis=1)

        nats = sums(self.nll)
        cross_entropy = MetricSums(nats, ratio, lower_is_better=True)
        losses = {LOSS: cross_entropy}
        if self.objective is not None:
            loss = MetricSums(sums(self.objective), ratio, lower_is_better=True)
            losses = {LOSS: loss, CROSS_ENTROPY: cross_entropy}
        return losses | {
            "perplexity": MetricSums(nats, exponential_ratio, lower_is_better=True),
            "accuracy": MetricSums(sums(self.correct), ratio),
        }

    def _example_sums(self, values: Float[np.ndarray, "t"]) -> Float[np.ndarray, "E"]:
        return np.bincount(self.example, values, minlength=self.examples)


TokenMeasure = Callable[[Any, Any, Any], Any]
"""Computes the losses of a batch; each jitted function is compiled once."""


def token_measure(objective: HeldOutObjective | None) -> TokenMeasure:
    """Returns the function that computes the losses, with an objective's if given."""
    if objective is None:
        return token_losses
    return bind(held_out_losses, objective)


def compile_scores_ahead(
    executor: Executor,
    model: PromptedModel,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    examples: Examples,
    plan: BatchPlan,
    measure: TokenMeasure,
) -> list[Future[Any]]:
    """Compiles the programs of `measure_tokens` in another thread."""
    batches = read_first_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
    )
    compile_for = functools.partial(compile_scores, measure, model, parameters)
    return [executor.submit(compile_for, abstract(batch)) for batch in batches]


def measure_tokens(
    model: PromptedModel,
    parameters: Parameters,
    examples: Examples,
    plan: BatchPlan,
    measure: TokenMeasure = token_losses,
) -> TokenOutcomes:
    """Computes the loss of every example once."""
    # Weight, nats, correctness and objective of all learned tokens, [k, t].
    values = learned_values(
        model, parameters, examples, plan, measure, lambda losses: list(losses)
    )
    weight, nll, correct, *objective = values
    counts = examples.weight_counts
    example = np.repeat(np.arange(len(examples)), counts)
    return TokenOutcomes(
        len(examples), example, weight, nll, correct.astype(bool), *objective
    )


def learned_values(
    model: PromptedModel,
    parameters: Parameters,
    examples: Examples,
    plan: BatchPlan,
    measure: TokenMeasure,
    arrays_of: Callable[[Any], Sequence[np.ndarray]],
) -> Float[np.ndarray, "k t"]:
    """Computes values of every learned token, in the order of the examples.

    `measure` is a function of a batch, and `arrays_of` returns the arrays `[B, m]` of
    its result. The other arguments are as in `measure_tokens`.

    Returns:
      the loss weight of each token, followed by the values.
    """
    counts = examples.weight_counts
    starts = np.cumsum(counts) - counts
    batches = stream_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
    )
    values = np.zeros((0, int(counts.sum())))
    scored = score_batches(measure, model, parameters, batches)
    for index, (batch, result) in enumerate(scored):
        arrays = np.stack([batch.loss_weights, *arrays_of(result)])  # [k, B, m]
        if not len(values):
            values = np.zeros((len(arrays), values.shape[1]))
        rows = plan.batch(index).rows
        # A row contains the learned tokens of its segments one after the other.
        for row, segments in enumerate(rows.reshape(len(rows), -1).tolist()):
            offset = 0
            for number in (number for number in segments if number != FILLING):
                start, count = int(starts[number]), int(counts[number])
                segment = arrays[:, row, offset : offset + count]
                values[:, start : start + count] = segment
                offset += count
    return values
