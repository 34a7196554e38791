"""OLMoE and FlexOlmo: experts, and norms of queries and keys over the whole width."""

from prompt_tuning.families.expert_layout import BALANCING, expert_recipes, read_experts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import read_rotary


def _read_olmoe(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("clip_qkv", None, "clipped projections are not implemented")
    return {
        **read_rotated(settings, epsilon=1e-5, divided=True),
        **read_experts(settings),
        "query_key_norm": "width",
        "biases": "attention" if settings.flag("attention_bias", False) else "none",
        "normalize_experts": settings.flag("norm_topk_prob", False),
    }


def _read_flex_olmo(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; norms are after sublayers, as in OLMo 2."""
    fields = _read_olmoe(settings)
    return {
        **fields,
        **read_rotary(settings, fields["head_width"], base=500_000.0),
        "norm_epsilon": settings.positive("rms_norm_eps", 1e-6),
        "norm_placement": "after",
    }


OLMOE = LLAMA.like(
    "olmoe", "OLMoE", _read_olmoe, recipes=expert_recipes, more_inert=BALANCING
)
FLEX_OLMO = OLMOE.like("flex_olmo", "FlexOlmo", _read_flex_olmo)
