"""Tensors that hold more than one part of a mixer with a memory."""

from collections.abc import Sequence

from prompt_tuning.checkpoints.stored_tensors import FusedPart, Transform
from prompt_tuning.checkpoints.tap_tensors import TapsOfPart
from prompt_tuning.core.model_config import ModelConfig


def memory_shares(config: ModelConfig, order: Sequence[str]) -> tuple[int, ...]:
    """Returns how many columns each projection has in a common tensor."""
    keys = config.recurrent_key_heads * config.recurrent_key_width
    values = config.recurrent_heads * config.recurrent_width
    sizes = {"query": keys, "key": keys, "value": values, "gate": values}
    return tuple(sizes.get(name, config.recurrent_heads) for name in order)


def tap_names(
    config: ModelConfig, module: str, order: Sequence[str], *, biased: bool = False
) -> dict[str, tuple[str, Transform]]:
    """Returns the tensors of the convolution before a mixer.

    `module` is its stored module, and `order` that of queries, keys and values among
    its channels.
    """
    shares = memory_shares(config, order)
    names: dict[str, tuple[str, Transform]] = {}
    for i, name in enumerate(order):
        taps = TapsOfPart(FusedPart(i, shares, in_first=False))
        names[f"{config.recurrence}/taps/{name}"] = (f"{module}.weight", taps)
        if biased:
            bias = f"{module}.bias", FusedPart(i, shares)
            names[f"{config.recurrence}/tap_bias/{name}"] = bias
    return names
