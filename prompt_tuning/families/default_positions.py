"""The number of positions of models whose `config.json` leaves it out."""

from collections.abc import Mapping

from prompt_tuning.families.hf_settings import HuggingFaceSettings

SETTING = "max_position_embeddings"
_TYPES = {
    2048: "exaone4 gpt_neox granite granitemoe granitemoehybrid hunyuan_v1_dense "
    "hunyuan_v1_moe llama olmo olmo2 olmo3 phi",
    4096: "arcee deepseek_v3 flex_olmo helium nemotron_h olmoe phi3 stablelm "
    "starcoder2",
    8192: "cohere cohere2 falcon_h1 gemma",
    32768: "qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
    "smollm3",
    65536: "olmo_hybrid",
    128_000: "lfm2 lfm2_moe qwen3_vl_moe_text qwen3_vl_text",
    131_072: "ernie4_5 glm glm4 glm4_moe gpt_oss llama4_text minimax ministral mistral "
    "mixtral phimoe",
    262_144: "bamba jamba ministral3",
    524_288: "seed_oss",
}
POSITIONS: Mapping[str, int] = {
    model_type: number
    for number, types in _TYPES.items()
    for model_type in types.split()
}
"""Default of `SETTING` in transformers 5.24, by model type.

These models have rotary positions or none, whose number is in no tensor's shape.
"""


def with_positions(
    settings: HuggingFaceSettings, model_type: str
) -> HuggingFaceSettings:
    """Returns the settings of a model with transformers' default of `SETTING`."""
    if model_type not in POSITIONS:
        return settings
    return settings.with_defaults({SETTING: POSITIONS[model_type]})
