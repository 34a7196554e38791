"""GLM-4.5 to 4.7: experts chosen by sigmoids, after layers without experts."""

from prompt_tuning.families import expert_layout
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated


def _read_glm4_moe(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, epsilon=1e-5, partial=0.5)
    return {
        **fields,
        **expert_layout.read_routed_experts(settings),
        "query_key_norm": "head" if settings.flag("use_qk_norm", False) else "none",
        "biases": "qkv" if settings.flag("attention_bias", False) else "none",
    }


# Further layers that predict more tokens at once are not read.
GLM4_MOE = LLAMA.like(
    "glm4_moe",
    "GLM-4.5 to 4.7, mixtures of experts",
    _read_glm4_moe,
    recipes=expert_layout.routed_expert_recipes,
    more_inert=expert_layout.BALANCING | {"num_nextn_predict_layers", "num_mtp_layers"},
)
