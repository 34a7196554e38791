"""The factories that a config can name: all of them, imported only when needed."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from prompt_tuning import losses, prompts

FACTORIES = {
    "Run": "prompt_tuning.config.run",
    "Pretrained": "prompt_tuning.settings.pretrained",
    "Rematerialization": "prompt_tuning.core.rematerialization",
    "BlockRange": "prompt_tuning.core.rematerialization",
    "DataSource": "prompt_tuning.settings.data_source",
    "Evaluation": "prompt_tuning.settings.evaluation_settings",
    "Rollouts": "prompt_tuning.settings.rollout_settings",
    **losses.FACTORIES,
    "ObjectiveFromPython": "prompt_tuning.config.python_objects",
    "optimizer_from_python": "prompt_tuning.config.python_objects",
    "prompt_from_python": "prompt_tuning.config.python_objects",
    "MeshShape": "prompt_tuning.settings.mesh_shape",
    "Pipeline": "prompt_tuning.settings.pipeline",
    "AxisRules": "prompt_tuning.settings.axis_rules",
    "ParameterGroup": "prompt_tuning.core.parameter_groups",
    "adafactor": "prompt_tuning.core.parameter_groups",
    "adamw": "prompt_tuning.core.parameter_groups",
    "optax_transformation": "prompt_tuning.core.optax_by_name",
    "optax_chain": "prompt_tuning.core.optax_by_name",
    "warmup_constant": "prompt_tuning.core.learning_rates",
    "warmup_linear_decay": "prompt_tuning.core.learning_rates",
    "warmup_cosine_decay": "prompt_tuning.core.learning_rates",
    "warmup_rsqrt_decay": "prompt_tuning.core.learning_rates",
    "t5_config": "prompt_tuning.core.t5_config",
    **prompts.FACTORIES,
}
"""The module of each factory."""


@functools.cache
def import_factories() -> dict[str, Callable[..., Any]]:
    """Imports all factories, and JAX with them."""
    return {
        name: getattr(importlib.import_module(module), name)
        for name, module in FACTORIES.items()
    }
