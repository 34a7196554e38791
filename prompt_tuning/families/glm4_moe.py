"""GLM-4.5 to 4.7: experts chosen by sigmoids, after layers without experts."""

from typing import Any

from prompt_tuning.families.expert_layout import (
    BALANCING,
    read_routed_experts,
    routed_expert_recipes,
)
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_layout
from prompt_tuning.families.rotary_settings import read_rotary


def read_glm4_moe(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_layout(settings)
    return (
        fields
        | read_rotary(settings, fields["head_width"], partial=0.5)
        | read_routed_experts(settings)
        | {
            "norm_epsilon": settings.positive("rms_norm_eps", 1e-5),
            "query_key_norm": "head" if settings.flag("use_qk_norm", False) else "none",
            "biases": "qkv" if settings.flag("attention_bias", False) else "none",
        }
    )


# Further layers that predict more tokens at once are not read.
GLM4_MOE = LLAMA.like(
    "glm4_moe",
    "GLM-4.5 to 4.7, mixtures of experts",
    read_glm4_moe,
    recipes=routed_expert_recipes,
    more_inert=BALANCING | {"num_nextn_predict_layers", "num_mtp_layers"},
)
