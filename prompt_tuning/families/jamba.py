"""Jamba: Mamba, attention in a few layers, and experts in every second one."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout, llama_layout, memory_layout
from prompt_tuning.families.bamba import NORMS
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA

NAMES = {
    **{"states": "mamba_d_state", "taps": "mamba_d_conv", "rank": "mamba_dt_rank"},
    **{"bias": "mamba_proj_bias", "tap_bias": "mamba_conv_bias"},
}

EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2}


def _read_jamba(settings: HuggingFaceSettings) -> ModelFields:
    settings = settings.with_defaults(EXPERTS)
    fields = llama_layout.read_layout(settings)
    layers, width = range(fields["layers"]), fields["width"]
    attention = _read_period(settings, "attn_layer", 8, 4)
    sparse = _read_period(settings, "expert_layer", 2, 1)
    mamba = [i for i in layers if i not in attention]
    inner = settings.size("mamba_expand", 2) * width
    experts, dense = {}, ()
    if settings.size("num_experts") > 1 and sparse:
        experts = expert_layout.read_experts(settings)
        dense = tuple(i for i in layers if i not in sparse)
    return {
        **fields,
        **experts,
        "positions": "none",
        "key_value_heads": settings.size("num_key_value_heads", 8),
        "normalize_experts": False,
        "dense_layers": dense,
        "dense_width": fields["feed_forward_width"] if dense else 0,
        **memory_layout.read_mamba(settings, mamba, width, inner, NAMES),
    }


def _read_period(
    settings: HuggingFaceSettings, name: str, period: int, offset: int
) -> range:
    """Returns the indices of the layers that have some part."""
    period = settings.integer(f"{name}_period", period, minimum=1)
    offset = settings.integer(f"{name}_offset", offset, minimum=0)
    if offset >= period:
        settings.refuse(f"{name}_offset", f"less than {name}_period, {period}")
    return range(offset, settings.layers("num_hidden_layers"), period)


def _jamba_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    part, prefix, experts = "mlp", expert_layout.prefix_of(names), {}
    if config.experts:
        part = "dense_mlp"
        experts = expert_layout.separate_experts(
            config, prefix, block="feed_forward", router="router"
        )
    some = config.dense_layers or not config.experts
    feed_forward = {
        f"{part}/{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down") if some
    }
    return experts | llama_layout.layout_recipes(
        config,
        names,
        modules=expert_layout.ATTENTION | feed_forward,
        norms=NORMS,
        final_norm="final_layernorm",
        others=memory_layout.mamba_tensors(config, "mamba"),
    )


JAMBA = LLAMA.like(
    "jamba",
    "Jamba",
    _read_jamba,
    recipes=_jamba_recipes,
    more_inert=expert_layout.BALANCING
    | {
        "use_mamba_kernels",
        "use_mambapy",
        "use_associative_scan",
        "num_logits_to_keep",
    },
)
