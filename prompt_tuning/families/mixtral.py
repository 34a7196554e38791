"""Mixtral: a Mistral with experts."""

import functools

from prompt_tuning.families.expert_layout import BALANCING, expert_recipes, read_experts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import has_window, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def read_mixtral(settings: HuggingFaceSettings) -> ModelFields:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_rotated(settings, base=1_000_000.0)
    kind = SLIDING if has_window(settings) else FULL
    return {
        **fields,
        **read_windows(settings, fields["layers"], [kind] * fields["layers"]),
        **read_experts(settings, "num_local_experts"),
        "norm_epsilon": settings.positive("rms_norm_eps", 1e-5),
    }


MIXTRAL = LLAMA.like(
    "mixtral",
    "Mixtral",
    read_mixtral,
    recipes=functools.partial(
        expert_recipes, block="block_sparse_moe", parts=("w1", "w3", "w2")
    ),
    expert_block="mlp",
    more_inert=BALANCING | {"router_jitter_noise"},
)
