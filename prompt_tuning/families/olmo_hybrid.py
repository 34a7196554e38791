"""OLMo Hybrid: the gated delta rule, and OLMo 3's attention in some layers."""

from prompt_tuning.checkpoints.special_layouts import taps_first
from prompt_tuning.checkpoints.stored_tensors import identity
from prompt_tuning.core.layer_kinds import NORMS_BEFORE, layers_with
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import PROJECTIONS, layout_recipes
from prompt_tuning.families.memory_layout import LINEAR
from prompt_tuning.families.olmo2 import OLMO2, read_olmo2
from prompt_tuning.families.qwen3_5 import OTHERS, read_delta_layers
from prompt_tuning.families.rotary_settings import FULL

DELTA = {
    f"gated_delta/{ours}": f"linear_attn.{name}_proj"
    for ours, name in (
        *(("query", "q"), ("key", "k"), ("value", "v"), ("gate", "g")),
        *(("strength", "b"), ("decay", "a"), ("output", "o")),
    )
}
TENSORS = OTHERS | {
    "gated_delta/norm_scale": ("linear_attn.o_norm.weight", identity),
    **{
        f"gated_delta/taps/{ours}": (f"linear_attn.{name}_conv1d.weight", taps_first)
        for ours, name in (("query", "q"), ("key", "k"), ("value", "v"))
    },
}
NORMS = {
    "self_attention_norm": "attention_layer_norm",
    "mlp_norm": "feedforward_layer_norm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _read_olmo_hybrid(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("hidden_act", "silu", "the convolution has SiLU")
    fields = read_olmo2(settings)
    heads, layers = fields["heads"], fields["layers"]
    period = min(layers, 4)
    keys = settings.size("linear_num_key_heads", heads)
    width = settings.size("linear_key_head_dim", int(0.75 * fields["width"] / keys))
    defaults = {
        **{"linear_num_key_heads": heads, "linear_num_value_heads": heads},
        **{"linear_key_head_dim": width, "linear_value_head_dim": 2 * width},
        "layer_types": [FULL if i % 4 == period - 1 else LINEAR for i in range(layers)],
    }
    delta = read_delta_layers(settings.with_defaults(defaults), layers)
    negative = settings.flag("linear_allow_neg_eigval", True)
    # Only a base that is null turns rotary positions off.
    block = settings.nested("rope_parameters", {}).values
    base = block.get("rope_theta", settings.values.get("rope_theta", 0))
    return {
        **fields,
        **delta,
        "norm_epsilon": settings.positive("rms_norm_eps", 1e-6),
        "positions": "none" if base is None else "rotary",
        "recurrent_norms_before": bool(delta),
        "recurrent_norm_epsilon": 1e-5,
        "maximum_strength": 2.0 if negative else 1.0,
    }


def _olmo_hybrid_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    # Of layers with attention transformers gives this norm the other name in files.
    after = "post_attention_layernorm"
    layer = layers_with(config, "self_attention_out_norm")[0]
    if not any(f"layers.{layer}.{after}" in name for name in names):
        after = NORMS["mlp_norm"] if names else after
    some = bool(config.recurrent_layers)
    norms = {x: name for x, name in NORMS.items() if some or x not in NORMS_BEFORE}
    return layout_recipes(
        config,
        names,
        modules=PROJECTIONS | (DELTA if some else {}),
        norms=norms | {"self_attention_out_norm": after},
        others=TENSORS if some else None,
    )


OLMO_HYBRID = OLMO2.like(
    "olmo_hybrid",
    "OLMo Hybrid",
    _read_olmo_hybrid,
    recipes=_olmo_hybrid_recipes,
    more_inert={
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        "linear_dt_init_floor",
    },
)
