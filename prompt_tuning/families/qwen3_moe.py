"""Qwen 3 with experts."""

from prompt_tuning.families import expert_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def _read_qwen3_moe(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings)
    windows = settings.flag("use_sliding_window", False)
    kind = SLIDING if windows and "sliding_window" in settings else FULL
    count = "num_experts" if "num_experts" in settings else "num_local_experts"
    return {
        **fields,
        **read_windows(settings, fields["layers"], [kind] * fields["layers"]),
        **expert_layout.read_experts(settings, count),
        **expert_layout.read_dense_layers(settings),
        "feed_forward_width": settings.size("moe_intermediate_size"),
        "query_key_norm": "head",
        "biases": "attention" if settings.flag("attention_bias", False) else "none",
        "normalize_experts": settings.flag("norm_topk_prob", False),
    }


QWEN3_MOE = LLAMA.like(
    "qwen3_moe",
    "Qwen 3, mixtures of experts",
    _read_qwen3_moe,
    recipes=expert_layout.expert_recipes,
    more_inert=expert_layout.BALANCING,
)
