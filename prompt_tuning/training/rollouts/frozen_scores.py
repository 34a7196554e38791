"""Log-probabilities of answers under the frozen model, for the reward "logprob"."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.evaluation.batch_scores import score_batch
from prompt_tuning.models.build import frozen_graph
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel


class FrozenScores:
    """Scores answers with the model without its prompts and adapters."""

    def __init__(self, model: PromptedModel):
        graph, self._paths = frozen_graph(model.config)
        self._model = dataclasses.replace(model, graph=graph)

    def __call__(self, parameters: Parameters, batch: Batch) -> Float[np.ndarray, "R"]:
        """Returns each row's mean log-probability of the learned tokens, in nats.

        `parameters` are all of the model's; the batch has no accumulation axis.
        """
        frozen = {path: parameters[path] for path in self._paths}
        scores = score_batch(mean_logprobs, self._model, frozen, batch)
        return np.asarray(jax.device_get(scores))


def mean_logprobs(
    graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "R"]:
    """Computes the mean log-probability of the learned tokens of each row."""
    mask = batch.loss_weights > 0
    total = jnp.sum(jnp.where(mask, token_losses(graph, parameters, batch).nll, 0), 1)
    return -total / jnp.maximum(jnp.sum(mask, 1), 1)
