"""Names of tensors and settings of layers with Mamba."""

from collections.abc import Mapping, Sequence

from prompt_tuning.checkpoints.stored_tensors import Transform, identity, transpose
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import fused_parts, projection_names
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.memory_layout import tap_names

TENSORS = {
    "step_up": ("dt_proj.weight", transpose),
    "step_bias": ("dt_proj.bias", identity),
    "decay_rate": ("A_log", transpose),
    "skip": ("D", identity),
}
NORMS = {"step_down": "dt_layernorm", "key": "b_layernorm", "query": "c_layernorm"}


def read_mamba(
    settings: HuggingFaceSettings,
    layers: Sequence[int],
    width: int,
    inner: int,
    names: Mapping[str, str],
) -> ModelFields:
    """Reads the sizes of Mamba.

    Args:
      settings: the settings in `config.json`.
      layers: indices of the layers that have it.
      width: the model's width.
      inner: number of channels.
      names: settings of a channel's states, the convolution's taps, the rank of steps,
        and the biases of both.
    """
    settings.require("hidden_act", "silu", "the convolution has SiLU")
    settings.require(names["bias"], False, "biases are not implemented")
    settings.require(names["tap_bias"], True, "other convolutions are not implemented")
    rank = -(-width // 16)
    if settings.value(names["rank"], "auto") != "auto":
        rank = settings.size(names["rank"])
    if not layers:
        return {}
    return {
        "recurrence": "mamba",
        "recurrent_layers": tuple(layers),
        "convolution_width": settings.size(names["taps"], 4),
        "recurrent_heads": inner,
        "recurrent_key_heads": 1,
        "recurrent_width": 1,
        "recurrent_key_width": settings.size(names["states"], 16),
        "step_rank": rank,
    }


def mamba_tensors(config: ModelConfig, module: str) -> dict[str, tuple[str, Transform]]:
    """Returns the tensors of a layer's mixer, in models with Mamba layers."""
    if not config.recurrent_layers:
        return {}
    keys, inner = config.recurrent_key_width, config.recurrent_heads
    shares = (config.step_rank, keys, keys)
    inward = ("step_down", "key", "query")
    fused = fused_parts("mamba", ("value", "gate"), f"{module}.in_proj", (inner, inner))
    fused |= fused_parts("mamba", inward, f"{module}.x_proj", shares)
    tensors = {
        f"mamba/{ours}": (f"{module}.{name}", transform)
        for ours, (name, transform) in TENSORS.items()
    }
    if config.recurrent_norm and config.recurrent_norm_scaled:
        tensors |= {
            f"mamba/norm_scales/{ours}": (f"{module}.{name}.weight", identity)
            for ours, name in NORMS.items()
        }
    output = {"mamba/output": f"{module}.out_proj"}
    taps = tap_names(config, f"{module}.conv1d", ("value",), biased=True)
    return projection_names(config, output, fused) | tensors | taps
