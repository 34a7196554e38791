"""Measure how well a model tells good answers from bad ones."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.evaluation.batch_scores import bind, score_batches
from prompt_tuning.evaluation.metric_sums import MetricSums, ratio
from prompt_tuning.losses.preference import AnswerObjective
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource

METRICS = ("preference_loss", "preference_accuracy", "preference_margin")
"""Loss of the objective, share of the examples with a lead, and mean lead in nats."""


class PreferenceMeasure:
    """An objective of judged answers, measured on held-out ones.

    `precompute`, given all parameters, adds to the answers what the objective reads
    from a reference model; None if it reads nothing.

    Attributes:
      examples: the answers.
    """

    def __init__(
        self,
        model: PromptedModel,
        data: DataSource,
        examples: ExampleGroups,
        objective: AnswerObjective,
        precompute: Callable[[Parameters], ExampleGroups] | None = None,
    ):
        self._model, self.examples, self._precompute = model, examples, precompute
        self._plan = plan_batches(data, model.interface, examples, shuffle=False)
        # The same object each time, so that its program is compiled once.
        self._measure = bind(example_outcomes, objective)

    def __call__(self, parameters: Parameters) -> dict[str, MetricSums]:
        """Computes the metrics, `METRICS`."""
        if self._precompute is not None:
            self.examples = self._precompute(parameters)
            self._precompute = None
        model, examples, plan = self._model, self.examples, self._plan
        batches = stream_batches(
            examples, plan, 0, plan.batches_per_epoch, pad_id=model.config.pad_id
        )
        values = np.zeros((len(examples), 2))
        scored = score_batches(self._measure, model, parameters, batches)
        for index, (_, outcomes) in enumerate(scored):
            numbers = plan.batch(index).rows
            real = numbers != FILLING
            values[numbers[real]] = outcomes[real]
        losses, leads = values.T
        weights = examples.weights.astype(np.float64)
        columns = zip(METRICS, (losses, leads > 0, leads), strict=True)
        return {
            name: MetricSums(
                np.stack([weights * column, weights], axis=1),
                ratio,
                lower_is_better=name == METRICS[0],
                per_example=False,
            )
            for name, column in columns
        }


def example_outcomes(
    objective: AnswerObjective,
    graph: nnx.GraphDef,
    parameters: Parameters,
    batch: Batch,
) -> Float[Array, "E 2"]:
    """Returns the loss and the lead of each example."""
    model = merge_model(graph, parameters)
    outcomes = objective.outcomes(
        model.hidden(batch), model.output_head(), batch, parameters
    )
    return jnp.stack(outcomes, axis=1)
