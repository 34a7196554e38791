"""Mamba-2 (Dao and Gu 2024): only state-space mixers as layers."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family, llama_layout, memory_layout
from prompt_tuning.families.family import Family, LayerNames, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.nemotron_h import DEFAULTS, SIZES, STORED, TABLE

NAMES = SIZES | {"heads": "num_heads", "states": "state_size"}


def _read_pure_mamba2(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("hidden_act", "silu", "the convolution has SiLU")
    settings.require("use_bias", False, "biases are not implemented")
    settings.require("use_conv_bias", True, "other convolutions are not implemented")
    fields = read_without_attention(settings, tied=False)
    layers, heads = (
        range(fields["layers"]),
        settings.size("num_heads", DEFAULTS["heads"]),
    )
    inner = settings.size("expand", 2) * fields["width"]
    of_head = settings.size("head_dim", 64)
    if heads * of_head != inner:
        settings.refuse("head_dim", f"{inner} divided by the {heads} heads")
    return {
        **fields,
        "heads": heads,
        "key_value_heads": heads,
        **memory_layout.read_mamba2(
            settings, layers, of_head, sizes=DEFAULTS, names=NAMES
        ),
        **memory_layout.read_step_limit(settings),
    }


def read_without_attention(settings: HuggingFaceSettings, *, tied: bool) -> ModelFields:
    """Returns fields of models with a recurrent mixer and nothing else in each layer.

    `tied` is the default of the head's setting.
    """
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": settings.size("hidden_size"),
        "feed_forward_width": 0,
        "layers": settings.layers("num_hidden_layers"),
        # There is no attention, and its sizes mean nothing.
        **{"heads": 1, "key_value_heads": 1, "head_width": 1},
        "norm": "rms",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "positions": "none",
        "activation": "silu",
        "gated": False,
        "tied_head": settings.flag("tie_word_embeddings", tied),
    }


def _pure_mamba2_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    output = {"mamba2/output": "mixer.out_proj"}
    projections = family.projection_names(
        config, output, memory_layout.mamba2_parts(config, "mixer")
    )
    mixer = memory_layout.mamba2_tensors(config, "mixer") | projections
    return recipes_without_attention(config, names, mixer)


def recipes_without_attention(
    config: ModelConfig, names: StoredNames, mixer: LayerNames
) -> Recipes:
    """Returns the recipes of all parameters, from the names of a layer's mixer."""
    return llama_layout.layout_recipes(
        config,
        names,
        modules={},
        norms={"self_attention_norm": "norm"},
        others=mixer,
        base=STORED,
        table="embeddings",
        final_norm="norm_f",
    )


MAMBA2 = Family(
    model_type="mamba2",
    title="Mamba-2",
    read_fields=_read_pure_mamba2,
    recipes=_pure_mamba2_recipes,
    embedding_tables=(f"{STORED}{TABLE}", TABLE),
    base_prefix=STORED,
    inert={
        *("chunk_size", "initializer_range", "rescale_prenorm_residual"),
        *("residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min"),
        *("time_step_rank", "use_cache"),
    },
)
