"""Marian and Pegasus: a BART with sinusoidal positions, which the table omits."""

from prompt_tuning.families.bart import BART, read_stacks
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields


def _read_marian(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_stacks(settings)
    reason = "separate tables of encoder and decoder are not implemented"
    settings.require("share_encoder_decoder_embeddings", True, reason)
    settings.require("decoder_vocab_size", fields["vocabulary_size"], reason)
    return fields | {
        "norm_placement": "after_sum",
        "positions": "sinusoidal",
        "decoder_start_id": settings.integer("decoder_start_token_id", 58_100),
    }


def _read_pegasus(settings: HuggingFaceSettings) -> ModelFields:
    return read_stacks(settings) | {
        "norm_placement": "before",
        "positions": "sinusoidal",
        "decoder_start_id": settings.integer("decoder_start_token_id", 0),
    }


MARIAN = BART.like("marian", "Marian, OPUS-MT", _read_marian, scales_ids=True)
PEGASUS = MARIAN.like("pegasus", "Pegasus", _read_pegasus)
