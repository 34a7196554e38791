"""GLM-4: interleaved and partial rotary positions; in 0414, norms around sublayers."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import GATED, Recipes, StoredNames, fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import layout_recipes, read_rotated

NORMS = {
    "self_attention_norm": "input_layernorm",
    "self_attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}


def _read_glm(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, epsilon=1.5625e-7, head_width=128, partial=0.5)
    return fields | {
        "rotary_interleaved": True,
        "biases": "qkv" if settings.flag("attention_bias", True) else "none",
    }


def _read_glm4(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `_read_glm`."""
    return _read_glm(settings) | {"norm_placement": "around"}


def _glm4_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    fused = fused_parts("mlp", GATED, "mlp.gate_up_proj")
    norms = NORMS if config.norm_placement == "around" else None
    return layout_recipes(config, names, fused=fused, norms=norms)


GLM4 = LLAMA.like("glm4", "GLM-4 0414", _read_glm4, recipes=_glm4_recipes)
GLM = GLM4.like("glm", "GLM-4 9B and Edge", _read_glm)
