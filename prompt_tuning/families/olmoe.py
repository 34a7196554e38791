"""OLMoE: a Llama with experts and norms of queries and keys over the whole width."""

import dataclasses
from typing import Any

from prompt_tuning.families.expert_layout import (
    BALANCING,
    expert_recipes,
    read_experts,
)
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import INERT, read_layout
from prompt_tuning.families.rotary_settings import read_rotary


def read_olmoe(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`.

    Raises:
      InputError: for a missing setting or an unsupported choice.
    """
    settings.require("clip_qkv", None, "clipped projections are not implemented")
    fields = read_layout(settings)
    width = settings.head_width(fields["width"], fields["heads"])
    return (
        fields
        | read_rotary(settings, width)
        | read_experts(settings)
        | {
            "head_width": width,
            "norm_epsilon": settings.positive("rms_norm_eps", 1e-5),
            "query_key_norm": "width",
            "biases": "attention" if settings.flag("attention_bias", False) else "none",
            "normalize_experts": settings.flag("norm_topk_prob", False),
        }
    )


OLMOE = dataclasses.replace(
    LLAMA,
    model_type="olmoe",
    title="OLMoE",
    read_fields=read_olmoe,
    recipes=expert_recipes,
    write_settings=None,
    inert=INERT | BALANCING,
)
