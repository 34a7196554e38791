"""Phi 3.5 MoE: experts chosen by SparseMixer, layer norms, and a biased head."""

import dataclasses

from prompt_tuning.core.rotary_scaling import RotaryDivisors
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.mixtral import MIXTRAL, read_mixtral
from prompt_tuning.families.rotary_settings import read_short_magnitude


def _read_phimoe(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("num_experts_per_tok", 2, "SparseMixer chooses two")
    biased = settings.flag("attention_bias", False)
    fields = read_mixtral(settings.with_defaults({"num_experts_per_tok": 2}))
    scaling = fields["rotary_scaling"]
    if isinstance(scaling, RotaryDivisors):
        magnitude = read_short_magnitude(settings)
        scaling = dataclasses.replace(scaling, magnitude=magnitude)
    noise = settings.number("router_jitter_noise", 0.01, minimum=0)
    return fields | {
        "rotary_scaling": scaling,
        "norm": "layer",
        "routing": "sparse_mixer",
        "expert_margin": 2 * noise,
        "head_bias": settings.flag("lm_head_bias", False),
        "biases": "attention" if biased else "none",
    }


PHIMOE = MIXTRAL.like(
    "phimoe",
    "Phi 3.5 MoE",
    _read_phimoe,
    inert=MIXTRAL.inert - {"router_jitter_noise", "pretraining_tp"}
    | {"input_jitter_noise"},
)
