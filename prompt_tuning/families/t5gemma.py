"""T5Gemma: an encoder and a decoder of Gemma 2's layers, with separate tables.

Encoder windows include `sliding_window` positions on each side, as in transformers 5.
Inputs and targets are scaled, prompt vectors included.
"""

from prompt_tuning.checkpoints.stored_tensors import Recipe
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.gemma2 import SIZES, read_gemma2
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import PROJECTIONS

PREFIX = "model."
HEAD = "lm_head.out_proj.weight"
TABLES = ("model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight")
ENCODER, DECODER = "encoder", "decoder"
DIFFERENT = {"layers", "windowed_layers", "logit_soft_cap", "tied_head"}
"""Fields in which encoder and decoder may differ, or that only the decoder has."""
CROSS = {
    ours.replace("self_", "cross_"): theirs.replace("self_", "cross_")
    for ours, theirs in PROJECTIONS.items()
    if ours.startswith("self_attention")
}


def _read_t5gemma(settings: HuggingFaceSettings) -> ModelFields:
    reason = "an encoder alone generates no text"
    settings.require("is_encoder_decoder", True, reason)
    encoder, decoder = (
        read_gemma2(settings.part(name, SIZES)) for name in (ENCODER, DECODER)
    )
    # Without a layer that has a window, a part has none.
    encoder, decoder = (
        {"window": counterpart.get("window"), **part}
        for part, counterpart in ((encoder, decoder), (decoder, encoder))
    )
    for name in sorted(decoder.keys() - DIFFERENT):
        if encoder[name] != decoder[name]:
            raise InputError(
                f"{settings.source} has a decoder whose {name} is "
                f"{shown(decoder[name])}, expected {shown(encoder[name])}, as in the "
                "encoder: stacks that differ are not implemented"
            )
    return decoder | {
        "architecture": "encoder_decoder",
        "encoder_layers": encoder["layers"],
        "encoder_windowed_layers": encoder.get("windowed_layers", ()),
        "tied_head": settings.flag("tie_word_embeddings", True),
        "separate_tables": True,
        "embedding_multiplier": 1.0,
        "input_multiplier": decoder["width"] ** 0.5,
        "decoder_start_id": settings.part(DECODER).integer("bos_token_id", 2),
        "encoder_input": "bos_text",
    }


def _t5gemma_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix = "" if TABLES[1] in names else PREFIX
    return {
        "token_embedder/embedding": Recipe((f"{prefix}encoder.embed_tokens.weight",)),
        "decoder_embedder/embedding": Recipe((f"{prefix}decoder.embed_tokens.weight",)),
        **_stack_recipes(ENCODER, config.encoder_layers, config, prefix),
        **_stack_recipes(DECODER, config.layers, config, prefix),
        **family.head_recipe(config, HEAD),
    }


def _stack_recipes(
    stack: str, layers: int, config: ModelConfig, prefix: str
) -> Recipes:
    sublayers = {"self_attention": "self_attn", "mlp": "feedforward"}
    modules = PROJECTIONS
    if stack == DECODER:
        sublayers["cross_attention"] = "cross_attn"
        modules = PROJECTIONS | CROSS
    norms = {}
    for ours, theirs in sublayers.items():
        norms[f"{ours}_norm"] = f"pre_{theirs}_layernorm"
        norms[f"{ours}_out_norm"] = f"post_{theirs}_layernorm"
    names = family.norm_names(config, norms) | family.projection_names(config, modules)
    return {
        **family.layer_recipes(stack, f"{prefix}{stack}.layers.{{}}.", layers, names),
        **family.final_norm_recipes(config, stack, f"{prefix}{stack}.norm"),
    }


T5GEMMA = Family(
    model_type="t5gemma",
    title="T5Gemma with an encoder and a decoder of one width",
    read_fields=_read_t5gemma,
    recipes=_t5gemma_recipes,
    embedding_tables=TABLES,
    base_prefix=PREFIX,
    head_name=HEAD,
    token_parts=(DECODER,),
    inert={
        *("dropout_rate", "classifier_dropout_rate", "attention_dropout"),
        # The parts have their own.
        *("vocab_size", "initializer_range"),
        *("use_cache", "is_decoder", "cross_attention_hidden_size"),
    },
)
