"""Qwen 3 VL with experts: reads the text model; see `qwen3_vl` on its positions."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes, read_rotated
from prompt_tuning.families.qwen3_vl import QWEN3_VL
from prompt_tuning.families.text_part import with_images


def _read_qwen3_vl_moe_text(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, base=500_000.0)
    count = "num_experts" if "num_experts" in settings else "num_local_experts"
    biased = settings.flag("attention_bias", False)
    return {
        **fields,
        **expert_layout.read_experts(settings, count),
        **expert_layout.read_dense_layers(settings),
        "feed_forward_width": settings.size("moe_intermediate_size"),
        "query_key_norm": "head",
        "biases": "attention" if biased else "none",
    }


def _qwen3_vl_moe_recipes(
    config: ModelConfig, names: StoredNames, prefix: str, head: str
) -> Recipes:
    modules = expert_layout.ATTENTION | expert_layout.feed_forward_modules(config)
    layout = layout_recipes(config, names, prefix=prefix, head=head, modules=modules)
    return layout | expert_layout.turned_experts(
        config, prefix, "mlp.gate", "mlp.experts"
    )


QWEN3_VL_MOE = with_images(
    QWEN3_VL,
    "qwen3_vl_moe",
    "Qwen 3 VL (experts; text model only)",
    {"qwen3_vl_moe_text": _read_qwen3_vl_moe_text},
    tied=False,
    recipes=_qwen3_vl_moe_recipes,
    more_inert=expert_layout.BALANCING | {"sliding_window"},
)
