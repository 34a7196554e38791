"""Tunes prompts and adapters in front of frozen language models, in JAX.

    import prompt_tuning as pt

    model = pt.load("bundled:skills-decoder")
    pairs = [("apple=", "pple"), ("bread=", "read"), ("chair=", "hair"), ...]
    tuned = pt.tune(model, pt.SoftPrompt(length=5), pairs)
    tuned.generate(["world="])

The examples in the docstrings begin with these lines. Names are imported when they are
first used: `import prompt_tuning` loads nothing. Their types and documentation are in
the stub next to this file, which scripts/make_stub.py writes.
"""

import importlib
from typing import Any

from prompt_tuning.core.version import __version__ as __version__
from prompt_tuning.losses import FACTORIES as OBJECTIVES
from prompt_tuning.prompts import FACTORIES as PROMPTS

MODULES = {
    "load": "api.tune",
    "tune": "api.tune",
    "reinforce": "api.reinforcement",
    "remember": "api.memories",
    "compose": "api.memory_composition",
    "retrieve": "api.memory_composition",
    "load_tuned": "api.tune",
    "Model": "api.model",
    "TunedModel": "api.tune",
    "Sampling": "decoding.sampling_settings",
    "BeamSearch": "decoding.beam_search",
    "InputError": "core.errors",
    "Batch": "core.batch",
    "Run": "config.run",
    "TrainState": "training.state",
    "train_step": "training.step",
    "gradients": "training.gradients",
    "update": "training.step",
    "open_run": "training.opening",
    "train": "training.loop",
    "TrainingResult": "training.loop",
}
"""The module of each public name."""

CONFIGURABLE = (
    "AxisRules",
    "BlockRange",
    "DataSource",
    "Evaluation",
    "MeshShape",
    "ParameterGroup",
    "Pipeline",
    "Pretrained",
    "Rematerialization",
    "Rollouts",
    "adafactor",
    "adamw",
    "optax_chain",
    "optax_transformation",
    "t5_config",
    "warmup_constant",
    "warmup_cosine_decay",
    "warmup_linear_decay",
    "warmup_rsqrt_decay",
    *OBJECTIVES,
    *PROMPTS,
)
"""Settings under the names that configs use; called with what is to be set."""

__all__ = ["__version__", *MODULES, *CONFIGURABLE]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name in MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
    elif name in CONFIGURABLE:
        from prompt_tuning.config.deferred_factories import Configurable

        value = Configurable(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
