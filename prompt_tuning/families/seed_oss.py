"""Seed-OSS: a Llama with separate choices of biases for attention's projections."""

from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import read_rotated

BIASES = {
    (False, False, False): "none",
    (True, False, False): "qkv",
    (True, True, False): "attention",
    (False, False, True): "mlp",
    (False, True, True): "out_mlp",
    (True, True, True): "all",
}
"""Our name of the biases of queries, keys and values, of the output, and of the MLP."""


def _read_seed_oss(settings: HuggingFaceSettings) -> ModelFields:
    inward = settings.flag("attention_bias", True)
    outward = settings.flag("attention_out_bias", False)
    feed_forward = settings.flag("mlp_bias", False)
    if (inward, outward, feed_forward) not in BIASES:
        expected = f"{not inward} with attention_out_bias = {outward} and mlp_bias = "
        settings.refuse("attention_bias", f"{expected}{feed_forward}")
    fields = read_rotated(settings, head_width=128)
    return fields | {"biases": BIASES[inward, outward, feed_forward]}


SEED_OSS = LLAMA.like(
    "seed_oss", "Seed-OSS", _read_seed_oss, more_inert={"residual_dropout"}
)
