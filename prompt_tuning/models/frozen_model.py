"""The structure of a frozen model without prompts and adapters."""

import jax
from flax import nnx

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.models.build import build_model


def frozen_graph(config: ModelConfig) -> tuple[nnx.GraphDef, tuple[str, ...]]:
    """Returns the structure of the frozen model of a config, and its parameters."""
    graph, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    return graph, tuple(abstract)
