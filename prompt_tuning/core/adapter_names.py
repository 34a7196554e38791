"""Names `base` (the model alone) and `trained` (with the adapters of its run).

Also the usual ratio of learning rates in a LoRA.
"""

BASE = "base"
"""Name by which a text chooses the frozen model."""
TRAINED = "trained"
"""Name by which it chooses the prompts and adapters of the run."""
OWN = "(trained)"
"""Name under which an engine has the prompts and adapters of its model."""
LORA_PLUS_RATIO = 1.0
"""Default of `ParameterGroup.lora_plus_ratio`."""


def shown_name(adapter: str | None) -> str:
    """Returns the name that texts show for an engine's adapter; None is the base."""
    if adapter is None:
        return BASE
    return TRAINED if adapter == OWN else adapter
