"""Gemma 4: heads of other sizes in layers without a window, and norms of values.

In these layers, the keys before norm and rotation may also be the values.
"""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, identity, transpose
from prompt_tuning.core.layer_kinds import (
    ATTENTION,
    DENSE,
    FEED_FORWARD,
    FULL_ATTENTION,
    SHARING,
    layer_kinds,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import llama_layout
from prompt_tuning.families.expert_layout import fused_experts, prefix_of, read_experts
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.gemma import GEMMA
from prompt_tuning.families.gemma3 import GEMMA3
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.rotary_settings import (
    FULL,
    read_proportional,
    read_window_rotary,
)
from prompt_tuning.families.text_part import with_images

DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
}
"""Values that folders may leave to `transformers.Gemma4TextConfig`."""
KINDS = {
    "self_attention": (ATTENTION, FULL_ATTENTION, *SHARING.values()),
    "mlp": (FEED_FORWARD, DENSE),
}
"""Kinds of layers that have the modules of a part."""
SOUND = {"audio_config", "audio_token_id", "boa_token_id", "eoa_token_index"}
EXPERTS = {
    "router": "router.proj.weight",
    "inward": "experts.gate_up_proj",
    "outward": "experts.down_proj",
}
EXPERT_NORMS = {
    "mlp/norms/shared": "pre_feedforward_layernorm",
    "mlp/norms/shared_out": "post_feedforward_layernorm_1",
    "mlp/norms/experts": "pre_feedforward_layernorm_2",
    "mlp/norms/experts_out": "post_feedforward_layernorm_2",
}
EXPERT_TENSORS = {
    "mlp/norms/router/scale": ("router.scale", identity),
    "mlp/expert_factors": ("router.per_expert_scale", identity),
}
INPUTS = {
    "layer_input/gate": "per_layer_input_gate",
    "layer_input/projection": "per_layer_projection",
}


def _read_gemma4(settings: HuggingFaceSettings) -> ModelFields:
    settings = settings.with_defaults(DEFAULTS)
    settings.choose("hidden_activation", ("gelu_pytorch_tanh",))
    settings.choose("use_bidirectional_attention", ("vision",))  # of images alone
    fields = llama_layout.read_layout(settings, tied=True)
    layers, width = fields["layers"], fields["head_width"]
    windows = read_windows(settings, layers, [*alternating(layers, 6)[:-1], FULL])
    if layers - 1 in windows.get("windowed_layers", ()):
        settings.refuse("layer_types", f"{FULL!r} as the last one")
    wide, groups = _full_sizes(settings, windows, fields["key_value_heads"])
    alike = settings.flag("attention_k_eq_v", False)
    return {
        **fields,
        **windows,
        **_read_sharing(settings, fields),
        **_read_experts(settings, fields),
        **read_proportional(settings, wide, base=1_000_000.0, partial=0.25),
        **read_window_rotary(settings, 10_000.0),
        "activation": "gelu_tanh",
        "biases": llama_layout.read_biases(settings),
        "head_width": wide,
        "windowed_head_width": width,
        "full_key_value_heads": groups,
        "keys_as_values": alike,
        "value_norm": True,
        "layer_factors": True,
        "norm_placement": "around",
        "query_key_norm": "head",
        "attention_multiplier": 1.0,
        "embedding_multiplier": fields["width"] ** 0.5,
        "logit_soft_cap": settings.value("final_logit_softcapping", None)
        and settings.positive("final_logit_softcapping"),
    }


def _read_sharing(
    settings: HuggingFaceSettings, fields: Mapping[str, Any]
) -> ModelFields:
    """Reads extra inputs of layers, and layers that reuse keys and values."""
    layers, size = (
        fields["layers"],
        settings.integer("hidden_size_per_layer_input", 256),
    )
    if size and settings.size("vocab_size_per_layer_input", 262_144) != (
        rows := fields["vocabulary_size"]
    ):
        settings.refuse("vocab_size_per_layer_input", f"vocab_size, {rows}")
    sharing = settings.integer("num_kv_shared_layers", 0)
    wide = settings.flag("use_double_wide_mlp", False) and sharing > 0
    return {
        "layer_input_width": size,
        "sharing_layers": sharing,
        "dense_layers": tuple(range(layers - sharing, layers)) if wide else (),
        "dense_width": 2 * fields["feed_forward_width"] if wide else 0,
    }


def _read_experts(
    settings: HuggingFaceSettings, fields: Mapping[str, Any]
) -> ModelFields:
    """Reads experts that run beside the feed-forward layer, which is the shared one."""
    if not settings.flag("enable_moe_block", False):
        return {}
    if settings.flag("use_double_wide_mlp", False):
        settings.refuse("use_double_wide_mlp", "False with enable_moe_block")
    return read_experts(settings, per_token="top_k_experts") | {
        "feed_forward_width": settings.size("moe_intermediate_size"),
        "shared_expert_width": fields["feed_forward_width"],
        "shared_expert_gated": False,
        "routing": "separate_norms",
    }


def _full_sizes(
    settings: HuggingFaceSettings, windows: Mapping[str, Any], groups: int
) -> tuple[int, int]:
    """Returns head width and number of key/value heads in layers without a window."""
    by_layer = settings.nested("per_layer_config", {}).values
    alike = settings.flag("attention_k_eq_v", False)
    if not by_layer:
        wide = settings.size("global_head_dim", 512)
        full = settings.size("num_global_key_value_heads", groups)
        return wide, full if alike else groups
    full = set(range(settings.layers("num_hidden_layers")))
    full -= set(windows.get("windowed_layers", ()))
    first, *rest = by_layer.values()
    named = {int(x) for x in by_layer if x.isdecimal()}
    if named != full or any(sizes != first for sizes in rest):
        settings.refuse("per_layer_config", "the same sizes for all full_attention")
    block = HuggingFaceSettings(f"per_layer_config in {settings.source}", first)
    width = block.size("head_dim", settings.size("head_dim"))
    return width, block.size("num_key_value_heads", groups)


def _gemma4_recipes(
    config: ModelConfig,
    names: StoredNames,
    prefix: str | None = None,
    head: str = "lm_head.weight",
) -> Recipes:
    """Returns the recipes of all parameters; see `Family.recipes`.

    `prefix` is the text model's, if not as in Llama, and `head` names an untied head.
    """
    modules, norms = (
        _of_kinds(config, x)
        for x in (llama_layout.PROJECTIONS, llama_layout.QUERY_KEY_NORMS)
    )
    prefix = prefix_of(names) if prefix is None else prefix
    layer_norms, experts = llama_layout.NORMS["around"], {}
    layer = {"factor": ("layer_scalar", identity)}
    if config.experts:
        layer_norms = {x: y for x, y in layer_norms.items() if x != "mlp_norm"}
        norms |= EXPERT_NORMS
        layer |= EXPERT_TENSORS
        experts = fused_experts(config, prefix, **EXPERTS)
    more = {}
    if config.layer_input_width:
        modules |= INPUTS
        norms |= {"layer_input/norm": "post_per_layer_input_norm"}
        more = {
            "token_embedder/layer_inputs/embedding": (
                "embed_tokens_per_layer",
                identity,
            ),
            "decoder/layer_inputs/projection": (
                "per_layer_model_projection",
                transpose,
            ),
            "decoder/layer_inputs/norm/scale": ("per_layer_projection_norm", identity),
        }
    return (
        llama_layout.layout_recipes(
            config,
            names,
            modules=modules,
            norms=layer_norms,
            query_key_norms=norms,
            prefix=prefix,
            head=head,
            others=layer,
        )
        | experts
        | {
            ours: Recipe((f"{prefix}{name}.weight",), transform=part)
            for ours, (name, part) in more.items()
        }
    )


def _of_kinds(config: ModelConfig, table: Mapping[str, str]) -> dict[str, str]:
    """Returns the modules of each kind of layer, from the modules of usual layers."""
    present = {part for kind in layer_kinds(config) for part in kind}
    found = {}
    for ours, module in table.items():
        part, name = ours.split("/")
        for kind in present.intersection(KINDS[part]):
            shared = kind in SHARING.values() and name.startswith(("key", "value"))
            alike = config.keys_as_values and (kind, name) == (FULL_ATTENTION, "value")
            if not shared and not alike:
                block = "mlp/shared" if config.experts and part == "mlp" else kind
                found[f"{block}/{name}"] = module
    return found


GEMMA4_TEXT = GEMMA.like(
    "gemma4_text",
    "Gemma 4, text models",
    _read_gemma4,
    recipes=_gemma4_recipes,
    prefix_aliases=GEMMA3.prefix_aliases,
    more_inert={"moe_intermediate_size", "num_experts", "top_k_experts"},
)
GEMMA4 = with_images(
    GEMMA4_TEXT,
    "gemma4",
    "Gemma 4 with images and sound (text model only)",
    {"gemma4_text": _read_gemma4},
    tied=True,
    recipes=_gemma4_recipes,
    head_name=GEMMA3.head_name,
    unread_parts=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
    unread_modules=tuple(
        f"model.{tower}.layers.{{}}.{name}"
        for tower in ("vision_tower.encoder", "audio_tower")
        for name in llama_layout.PROJECTIONS.values()
    ),
    more_inert=GEMMA3.inert | SOUND,
)
