"""Names of tensors and settings of layers with Mamba-2."""

import math
from collections.abc import Mapping, Sequence

from prompt_tuning.checkpoints.stored_tensors import FusedPart, Transform, identity
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.memory_layout import memory_shares, tap_names
from prompt_tuning.families.rotary_settings import FULL

LINEAR = "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers as transformers 4 writes them."""
TENSORS = {
    "decay_rate": ("A_log", identity),
    "skip": ("D", identity),
    "step_bias": ("dt_bias", identity),
    "norm_scale": ("norm.weight", identity),
}
SIZES = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "states": "mamba_d_state",
    "taps": "mamba_d_conv",
}
"""Names of settings of sizes."""


def read_mamba2(
    settings: HuggingFaceSettings,
    layers: Sequence[int],
    width: int,
    *,
    sizes: Mapping[str, int],
    names: Mapping[str, str] = SIZES,
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


def read_expansion(
    settings: HuggingFaceSettings, width: int, heads: int, inner: int | None = None
) -> int:
    """Returns the width of a head, from the expansion of the model's width.

    `inner` is the expanded width, if not a multiple of the model's `width`.

    Raises:
      InputError: if heads have another width, a projection has a bias, or the
        convolution has none.
    """
    settings.require("mamba_proj_bias", False, "biases are not implemented")
    settings.require("mamba_conv_bias", True, "other convolutions are not implemented")
    if inner is None:
        inner = settings.size("mamba_expand", 2) * width
    assert inner is not None
    if inner % heads:
        settings.refuse("mamba_n_heads", f"a divisor of {inner}, the expanded width")
    if settings.value("mamba_d_head", "auto") not in ("auto", inner // heads):
        settings.refuse("mamba_d_head", f"{inner // heads}, or 'auto'")
    return inner // heads


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
        for ours, (name, transform) in TENSORS.items()
        if config.recurrent_norm or ours != "norm_scale"
    } | tap_names(config, f"{module}.conv1d", order, biased=True)
