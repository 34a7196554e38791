"""Initialize LoRA from the activations of the first batches (EVA)."""

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, split
from prompt_tuning.core.status_line import status
from prompt_tuning.pretrained.prompted_model import PromptedModel, build_tuned
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.activation_probes import (
    ActivationProbes,
    Components,
    components_by_path,
    distribute_ranks,
    first_factors,
)
from prompt_tuning.prompts.dora import LORA_A
from prompt_tuning.prompts.low_rank import EVA
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.training.gradients import objective_gradient

BATCHES = 64
"""Maximum number of batches that are read."""
ALIKE = 0.99
"""A component has converged if its cosine with that before the batch reaches this.

The value is PEFT's (`EvaConfig.tau`).
"""


@status("reading activations")
def start_from_activations(
    tuning: Tuning,
    model: PromptedModel,
    parameters: Parameters,
    read_batch: Callable[[int], Batch],
    *,
    known: Collection[str] = (),
) -> Parameters:
    """Returns the initial factors of the LoRAs that start from activations.

    `read_batch` reads the batch of a step; `known` are the paths of parameters that
    start from another source.
    """
    if all(path + LORA_A in known for path in model.activation_loras):
        return {}
    components, ranks = read_components(tuning, model, parameters, read_batch)
    return first_factors(components, ranks, parameters)


def read_components(
    tuning: Tuning,
    model: PromptedModel,
    parameters: Parameters,
    read_batch: Callable[[int], Batch],
) -> tuple[dict[str, Components], dict[str, list[int]]]:
    """Computes the principal components of each projection's inputs.

    Reads batches in training order until all components that get a rank have converged,
    or `BATCHES` batches. The arguments are as in `start_from_activations`.

    Returns:
      by the path of the projection, the components and the rank in each layer.
    """
    loras = model.activation_loras
    graph, abstract = _with_probes(tuning, model)
    frozen = {path: parameters[path] for path in abstract if path in parameters}
    probes = {
        path: jnp.zeros(x.shape) for path, x in abstract.items() if path not in frozen
    }

    @jax.jit
    def read(probes: Parameters, frozen: Parameters, batch: Batch):
        after, _ = objective_gradient(graph, probes, frozen, batch, None)
        old, now = components_by_path(probes), components_by_path(after)
        likeness = {path: now[path].likeness(old[path]) for path in now}
        return after, likeness, {path: x.shares for path, x in now.items()}

    ranks: dict[str, list[int]] = {}
    for index in range(BATCHES):
        for part in _micro_batches(read_batch(index), model.config):
            probes, likeness, shares = read(probes, frozen, part)
        ranks = distribute_ranks(jax.device_get(shares), loras)
        if _converged(jax.device_get(likeness), ranks):
            break
    return components_by_path(probes), ranks


def _with_probes(
    tuning: Tuning, model: PromptedModel
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the structure of the model with probes, and its parameter shapes."""
    adapters = [
        ActivationProbes.of(x) if isinstance(x, LoRA) and x.initial == EVA else x
        for x in tuning.adapters
    ]
    tuning = dataclasses.replace(tuning, adapters=adapters)

    def build(key: Key[Array, ""]) -> tuple[nnx.GraphDef, Parameters]:
        return split(build_tuned(key, model.config, model.prompts, tuning))

    return describe(build, jax.random.key(0))


def _micro_batches(batch: Batch, config: ModelConfig) -> list[Batch]:
    """Splits a batch along its accumulation axis; each part updates the components.

    Filler rows have no real token in a causal model.
    """
    causal = config.architecture == "decoder_only" and not config.bidirectional
    if causal and np.shape(batch.real_rows) == np.shape(batch.lengths):
        batch = dataclasses.replace(batch, lengths=batch.lengths * batch.real_rows)
    if batch.tokens.ndim == 2:
        return [batch]
    count = len(batch.tokens)
    return [jax.tree.map(lambda x, i=i: x[i], batch) for i in range(count)]


def _converged(likeness: dict[str, np.ndarray], ranks: dict[str, list[int]]) -> bool:
    """Whether all components that get a rank are unchanged by the last batch."""
    return all(
        (table[layer, :rank] >= ALIKE).all()
        for path, table in likeness.items()
        for layer, rank in enumerate(ranks[path])
    )
