"""Parameters that are one in PEFT, but more than one here."""

from prompt_tuning.adapters.adapter import LORA, PREFIX, Adapter
from prompt_tuning.adapters.peft import modules
from prompt_tuning.adapters.peft.lora import A
from prompt_tuning.adapters.peft.prompts import repeated_layers
from prompt_tuning.core.model_config import ModelConfig


def trained_as_one(adapter: Adapter, config: ModelConfig) -> str | None:
    """Describes parameters that PEFT trains as one, and we as several.

    Args:
      adapter: an adapter; without settings it is not PEFT's.
      config: config of the adapter's model.

    Returns:
      a clause for messages; None if PEFT trains the same parameters.
    """
    if not adapter.settings:
        return None
    if adapter.kind == PREFIX:
        layers = repeated_layers(adapter.settings, config)
        if layers:
            return (
                f"PEFT trains one key and value for layers {layers[0]} and {layers[1]} "
                "of the decoder (and so on), which have their own here"
            )
    if adapter.kind == LORA:
        known = modules.projections(config) | modules.expert_projections(config)
        shared = [
            module
            for module, parts in modules.by_module(known).items()
            if sum(f"{part.path}/{A}" in adapter.parameters for part in parts) > 1
        ]
        if shared:
            return (
                f"PEFT trains one lora_A for {shared[0]} (and {len(shared) - 1} other "
                "modules), whose projections have their own here"
            )
    return None
