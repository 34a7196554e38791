"""Structure of the frozen model alone, without prompts and adapters."""

import jax
from flax import nnx

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.models.build import build_model


def frozen_graph(config: ModelConfig) -> tuple[nnx.GraphDef, tuple[str, ...]]:
    """Returns the structure of a config's frozen model, and its parameters' paths."""
    graph, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    return graph, tuple(abstract)
