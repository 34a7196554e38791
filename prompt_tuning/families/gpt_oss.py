"""gpt-oss: attention sinks, experts with biases and a clamped SwiGLU, MXFP4 weights."""

from prompt_tuning.checkpoints.special_layouts import EveryOther
from prompt_tuning.checkpoints.stored_tensors import identity, layered, transpose
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.expert_layout import ATTENTION, BALANCING, read_experts
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import alternating, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import PREFIX, layout_recipes, read_rotated

TENSORS = {
    "mlp/router/kernel": ("mlp.router.weight", transpose),
    "mlp/router/bias": ("mlp.router.bias", identity),
    "mlp/expert_gate": ("mlp.experts.gate_up_proj", EveryOther(0)),
    "mlp/expert_up": ("mlp.experts.gate_up_proj", EveryOther(1)),
    "mlp/expert_down": ("mlp.experts.down_proj", identity),
    "mlp/expert_gate_bias": ("mlp.experts.gate_up_proj_bias", EveryOther(0)),
    "mlp/expert_up_bias": ("mlp.experts.gate_up_proj_bias", EveryOther(1)),
    "mlp/expert_down_bias": ("mlp.experts.down_proj_bias", identity),
    "self_attention/sinks": ("self_attn.sinks", identity),
}


def _read_gpt_oss(settings: HuggingFaceSettings) -> ModelFields:
    settings.choose("hidden_act", ("silu",))
    settings.require("swiglu_alpha", 1.702, "other slopes are not implemented")
    if "rope_scaling" not in settings:
        settings.nested("rope_parameters")  # transformers' default is YaRN
    fields = read_rotated(settings, epsilon=1e-5, head_width=64, base=150_000.0)
    return {
        **fields,
        **read_windows(settings, fields["layers"], alternating(fields["layers"], 2)),
        **read_experts(settings, "num_local_experts"),
        "attention_sinks": True,
        # Its slope is that of the quick GELU.
        "activation": "quick_gelu",
        "expert_limit": settings.positive("swiglu_limit", 7.0),
        "biases": "all" if settings.flag("attention_bias", True) else "mlp",
    }


def _gpt_oss_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix = "" if "embed_tokens.weight" in names else PREFIX
    tensors = {
        f"decoder/layers/{ours}": layered(
            f"{prefix}layers.{{}}.{name}", config.layers, part
        )
        for ours, (name, part) in TENSORS.items()
    }
    return layout_recipes(config, names, modules=ATTENTION) | tensors


GPT_OSS = LLAMA.like(
    "gpt_oss", "gpt-oss", _read_gpt_oss, recipes=_gpt_oss_recipes, more_inert=BALANCING
)
