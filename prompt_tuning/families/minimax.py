"""MiniMax-Text-01: lightning attention in most layers, and experts in all.

A sublayer's output is added to the norm of its input, so each of these norms acts like
a norm after the preceding sum.
"""

import numpy as np

from prompt_tuning.checkpoints import stored_tensors
from prompt_tuning.checkpoints.stored_tensors import Recipe, Transform
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout, llama_layout
from prompt_tuning.families.family import QKV, Recipes, StoredNames, fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.memory_layout import LINEAR, read_kinds
from prompt_tuning.families.mixtral import MIXTRAL
from prompt_tuning.families.rotary_settings import FULL, read_rotary, read_rotary_dim

SUBLAYERS = ("full_attn", "linear_attn", "mlp")
STACK = "decoder/layers"


def _read_minimax(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("hidden_act", "silu", "lightning attention has SiLU")
    settings.require("sliding_window", None, "windows are not implemented")
    fields = llama_layout.read_layout(settings, epsilon=1e-5)
    heads, width, layers = fields["heads"], fields["head_width"], fields["layers"]
    usual = [LINEAR if i % 2 else FULL for i in range(layers)]
    kinds = read_kinds(settings.with_defaults({"layer_types": usual}), layers)
    linear = tuple(i for i, kind in enumerate(kinds) if kind == LINEAR)
    recurrence = {
        "recurrence": "lightning",
        "recurrent_layers": linear,
        **{"recurrent_heads": heads, "recurrent_key_heads": heads},
        **{"recurrent_width": width, "recurrent_key_width": width},
        "recurrent_norm_epsilon": 1e-6,
    }
    # The published model was trained with it, which transformers 5.24 does not read.
    rotated = read_rotary_dim(settings, width, width)
    return {
        **fields,
        **read_rotary(settings, rotated, base=1_000_000.0),
        "rotary_width": None if rotated == width else rotated,
        **expert_layout.read_experts(
            settings.with_defaults({"num_local_experts": 8, "num_experts_per_tok": 2}),
            "num_local_experts",
        ),
        **(recurrence if linear else {}),
        "key_value_heads": settings.size("num_key_value_heads", 8),
        **{"norm_placement": "after_sum", "embedding_norm": True},
        **_read_factors(settings),
    }


def _read_factors(settings: HuggingFaceSettings) -> dict[str, float]:
    found = {}
    for ours, kind in (("skip", "alpha"), ("residual", "beta")):
        names = [f"{name}_{kind}_factor" for name in SUBLAYERS]
        first, *rest = (settings.positive(name, 1.0) for name in names)
        for name, value in zip(names[1:], rest, strict=True):
            if value != first:
                settings.refuse(name, f"{first}, as {names[0]}")
        found[f"{ours}_multiplier"] = first
    return found


def _minimax_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix, fused, output, rest = expert_layout.prefix_of(names), {}, {}, {}
    if config.recurrent_layers:
        heads, stored = config.recurrent_heads, "self_attn.qkv_proj"
        fused = fused_parts("lightning", QKV, stored, groups=heads)
        output = {"gate": "self_attn.output_gate", "output": "self_attn.out_proj"}
        tensors: dict[str, tuple[str, Transform]] = {
            "decay_rate": ("self_attn.slope_rate", stored_tensors.flattened),
            "norm_scale": ("self_attn.norm.weight", stored_tensors.identity),
        }
        rest = {f"lightning/{ours}": x for ours, x in tensors.items()}
    recipes = llama_layout.layout_recipes(
        config,
        names,
        modules=expert_layout.ATTENTION
        | {f"lightning/{ours}": x for ours, x in output.items()},
        norms={"self_attention_out_norm": llama_layout.AFTER},
        fused=fused,
        others=rest,
    )
    final = recipes.pop("decoder/final_norm/scale")
    first, *norms = (
        f"{prefix}layers.{i}.{llama_layout.BEFORE}.weight" for i in range(config.layers)
    )
    recipes["embedding_norm/scale"] = Recipe((first,))
    recipes[f"{STACK}/mlp_out_norm/scale"] = Recipe((*norms, *final.sources), True)
    block, parts = "block_sparse_moe", ("w1", "w3", "w2")
    return recipes | expert_layout.separate_experts(
        config, prefix, block=block, parts=parts
    )


def _decay_rates(config: ModelConfig, names: StoredNames) -> dict[str, np.ndarray]:
    """Returns the rates of heads `[H, 1, 1]`, by their stored names.

    Head `h` of `H`, from 1, decays by `2 ** (-8 h / H)`, times a factor that falls from
    1 in the first layer to nearly 0 in the last. transformers stores them as buffers.
    """
    prefix, heads = expert_layout.prefix_of(names), config.recurrent_heads
    rates = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    return {
        f"{prefix}layers.{i}.self_attn.slope_rate": (
            rates * (1 - i / (config.layers - 1 + 1e-5) + 1e-5)
        ).astype(np.float32)[:, None, None]
        for i in config.recurrent_layers
    }


MINIMAX = MIXTRAL.like(
    "minimax",
    "MiniMax-Text-01",
    _read_minimax,
    recipes=_minimax_recipes,
    buffers=_decay_rates,
    more_inert={"block_size"},
)
