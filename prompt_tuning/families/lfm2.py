"""LFM2: gated short convolutions, and attention in some layers (Liquid AI 2025)."""

from prompt_tuning.checkpoints.special_layouts import taps_first
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import llama_layout
from prompt_tuning.families.expert_layout import ATTENTION
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import read_layers
from prompt_tuning.families.rotary_settings import FULL

CONVOLUTION = "conv"
MODULES = ATTENTION | {
    "self_attention/out": "self_attn.out_proj",
    "short_convolution/input": "conv.in_proj",
    "short_convolution/output": "conv.out_proj",
}
FEED_FORWARD = {"gate": "w1", "up": "w3", "down": "w2"}
NORMS = {"self_attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
QUERY_KEY_NORMS = {
    "self_attention/query_norm": "self_attn.q_layernorm",
    "self_attention/key_norm": "self_attn.k_layernorm",
}


def _read_lfm2(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_lfm2_layers(settings)
    return fields | {"feed_forward_width": _feed_forward_width(settings)}


def read_lfm2_layers(settings: HuggingFaceSettings) -> ModelFields:
    """Reads everything except the feed-forward layers."""
    fields = llama_layout.read_rotated(settings, tied=True, base=1_000_000.0)
    tied = settings.flag("tie_embedding", fields["tied_head"])
    reason = "biases of convolutions are not implemented"
    settings.require("conv_bias", False, reason)
    return {
        **fields,
        "norm_epsilon": settings.positive("norm_eps", 1e-5),
        "query_key_norm": "head",
        "tied_head": tied,
        **_read_convolutions(settings, fields["layers"]),
    }


def _read_convolutions(settings: HuggingFaceSettings, layers: int) -> ModelFields:
    """Reads which layers have a convolution, and its width.

    Raises:
      InputError: for another kind of layer.
    """
    attention = settings.sequence("full_attn_idxs", list(range(layers)))
    default = [FULL if i in attention else CONVOLUTION for i in range(layers)]
    numbers = read_layers(settings, layers, default, CONVOLUTION)
    width = settings.integer("conv_L_cache", 3, minimum=2)
    if not numbers:
        return {}
    return {
        "recurrence": "short_convolution",
        "recurrent_layers": numbers,
        "convolution_width": width,
    }


def _feed_forward_width(settings: HuggingFaceSettings) -> int:
    """Returns the width after transformers' adjustment."""
    width = settings.size("block_ff_dim", settings.size("intermediate_size", 12_288))
    if not settings.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    width = int(settings.positive("block_ffn_dim_multiplier", 1.0) * width)
    multiple = settings.size("block_multiple_of", 256)
    return -(-width // multiple) * multiple


def lfm2_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    """Returns the recipes of all parameters except for experts."""
    part = "dense_mlp" if config.experts else "mlp"
    absent = config.experts and not config.dense_layers
    feed_forward = {
        f"{part}/{ours}": f"feed_forward.{name}" for ours, name in FEED_FORWARD.items()
    }
    modules = {
        path: module
        for path, module in MODULES.items()
        if config.recurrent_layers or not path.startswith("short_convolution/")
    }
    return llama_layout.layout_recipes(
        config,
        names,
        modules=modules | ({} if absent else feed_forward),
        norms=NORMS,
        query_key_norms=QUERY_KEY_NORMS,
        final_norm="embedding_norm",
        others={"short_convolution/taps": ("conv.conv.weight", taps_first)}
        if config.recurrent_layers
        else None,
    )


LFM2 = Family(
    model_type="lfm2",
    title="LFM2 and LFM2.5, dense",
    read_fields=_read_lfm2,
    recipes=lfm2_recipes,
    embedding_tables=llama_layout.TABLES,
    base_prefix=llama_layout.PREFIX,
    inert={"initializer_range", "use_cache"},
)
