"""Names of tensors and settings of layers with a memory: Mamba, Mamba-2 and others."""

import math
from collections.abc import Mapping, Sequence

from prompt_tuning.checkpoints.special_layouts import TapsOfPart
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Transform,
    identity,
    transpose,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import fused_parts, projection_names
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.rotary_settings import FULL

LINEAR = "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers as transformers 4 writes them."""
MAMBA2_TENSORS = {
    "decay_rate": ("A_log", identity),
    "skip": ("D", identity),
    "step_bias": ("dt_bias", identity),
    "norm_scale": ("norm.weight", identity),
}
MAMBA2_SIZES = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "states": "mamba_d_state",
    "taps": "mamba_d_conv",
}
"""Names of settings of Mamba-2's sizes."""
MAMBA2_DEFAULTS = {"heads": 128, "groups": 1, "states": 256, "taps": 4}
"""Default sizes of models whose settings have these names."""
MAMBA_TENSORS = {
    "step_up": ("dt_proj.weight", transpose),
    "step_bias": ("dt_proj.bias", identity),
    "decay_rate": ("A_log", transpose),
    "skip": ("D", identity),
}
MAMBA_NORMS = {
    "step_down": "dt_layernorm",
    "key": "b_layernorm",
    "query": "c_layernorm",
}


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
        for ours, (name, transform) in MAMBA_TENSORS.items()
    }
    if config.recurrent_norm and config.recurrent_norm_scaled:
        tensors |= {
            f"mamba/norm_scales/{ours}": (f"{module}.{name}.weight", identity)
            for ours, name in MAMBA_NORMS.items()
        }
    output = {"mamba/output": f"{module}.out_proj"}
    taps = tap_names(config, f"{module}.conv1d", ("value",), biased=True)
    return projection_names(config, output, fused) | tensors | taps


def read_mamba2(
    settings: HuggingFaceSettings,
    layers: Sequence[int],
    width: int,
    *,
    sizes: Mapping[str, int],
    names: Mapping[str, str] = MAMBA2_SIZES,
) -> ModelFields:
    """Reads the sizes of Mamba-2.

    Args:
      settings: the settings in `config.json`.
      layers: indices of the layers that have it.
      width: width of a head.
      sizes: default sizes.
      names: names of the settings of these sizes.
    """
    found = {name: settings.size(names[name], sizes[name]) for name in names}
    if not layers:
        return {}
    return {
        "recurrence": "mamba2",
        "recurrent_layers": tuple(layers),
        "convolution_width": found["taps"],
        "recurrent_heads": found["heads"],
        "recurrent_key_heads": found["groups"],
        "recurrent_width": width,
        "recurrent_key_width": found["states"],
    }


def read_expanded(
    settings: HuggingFaceSettings,
    layers: Sequence[int],
    width: int,
    inner: int | None = None,
) -> ModelFields:
    """Reads the sizes of Mamba-2 and the smallest step.

    Heads divide the expansion of the model's `width`, or `inner` if it is given.

    Raises:
      InputError: if heads have another width, a projection has a bias, or the
        convolution has none.
    """
    heads = settings.size(MAMBA2_SIZES["heads"], MAMBA2_DEFAULTS["heads"])
    settings.require("mamba_proj_bias", False, "biases are not implemented")
    settings.require("mamba_conv_bias", True, "other convolutions are not implemented")
    if inner is None:
        inner = settings.size("mamba_expand", 2) * width
    assert inner is not None
    if inner % heads:
        settings.refuse("mamba_n_heads", f"a divisor of {inner}, the expanded width")
    if settings.value("mamba_d_head", "auto") not in ("auto", inner // heads):
        settings.refuse("mamba_d_head", f"{inner // heads}, or 'auto'")
    found = read_mamba2(settings, layers, inner // heads, sizes=MAMBA2_DEFAULTS)
    return found | read_step_limit(settings)


def read_step_limit(settings: HuggingFaceSettings) -> ModelFields:
    """Reads the smallest step.

    Raises:
      InputError: if there is a largest step.
    """
    limits = settings.sequence("time_step_limit", [0.0, math.inf])
    infinite = (math.inf, {"__float__": "Infinity"})  # as transformers 5 writes it
    if (
        len(limits) != 2
        or limits[1] not in infinite
        or type(limits[0]) not in (int, float)
        or not 0 <= limits[0] <= 1
    ):
        expected = "the least step, from 0 to 1, and infinity"
        settings.refuse("time_step_limit", expected)
    return {"minimum_step": float(limits[0])}


def read_kinds(settings: HuggingFaceSettings, layers: int) -> list[str]:
    """Returns the kind of each layer, with the names of transformers 5.

    Raises:
      InputError: for another kind.
    """
    name = "layer_types" if "layer_types" in settings else "layers_block_type"
    listed = settings.sequence(name, [LINEAR] * layers)
    kinds = [OLD_KINDS.get(str(kind), str(kind)) for kind in listed]
    if len(kinds) != layers or not set(kinds) <= {LINEAR, FULL}:
        expected = f"a list of {layers} texts, each {LINEAR!r} or {FULL!r}"
        settings.refuse(name, expected)
    return kinds


def mamba2_parts(
    config: ModelConfig, module: str = "mamba"
) -> dict[str, tuple[str, FusedPart]]:
    """Returns the parts of the input projection, in models with Mamba-2 layers."""
    if not config.recurrent_layers:
        return {}
    order = ("gate", "value", "key", "query", "step")
    shares = memory_shares(config, order)
    return fused_parts("mamba2", order, f"{module}.in_proj", shares)


def mamba2_tensors(
    config: ModelConfig, module: str = "mamba"
) -> dict[str, tuple[str, Transform]]:
    """Returns a layer's tensors other than projections, if there are such layers."""
    if not config.recurrent_layers:
        return {}
    order = ("value", "key", "query")
    return {
        f"mamba2/{ours}": (f"{module}.{name}", transform)
        for ours, (name, transform) in MAMBA2_TENSORS.items()
        if config.recurrent_norm or ours != "norm_scale"
    } | tap_names(config, f"{module}.conv1d", order, biased=True)
