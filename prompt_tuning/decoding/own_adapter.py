"""The prompts and adapters of an engine's own model, under one name."""

from prompt_tuning.core.adapter_names import OWN
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.decoding_engine import DecodingEngine


def add_own_adapter(engine: DecodingEngine, parameters: Parameters) -> None:
    """Adds the prompts and adapters of an engine's model as `OWN`, if it has some.

    Args:
      engine: an engine, which leaves these out.
      parameters: all parameters of its model by path.
    """
    if engine.model.graph != engine.graph:
        engine.add_adapter(OWN, engine.model, parameters)


def own_adapter(engine: DecodingEngine) -> str | None:
    """Returns `OWN` if an engine has it, else None for the frozen model."""
    return OWN if OWN in engine.adapters else None
