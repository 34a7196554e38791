"""GPT-Neo: a GPT-2 with windows in alternate layers and unscaled scores."""

import functools
from typing import Any

from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family
from prompt_tuning.families.gpt2 import NORMS, OUTSIDE, POSITIONS, PREFIX
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes

PROJECTIONS = {
    "self_attention/query": "attn.attention.q_proj",
    "self_attention/key": "attn.attention.k_proj",
    "self_attention/value": "attn.attention.v_proj",
    "self_attention/out": "attn.attention.out_proj",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}


def _read_gpt_neo(settings: HuggingFaceSettings) -> ModelFields:
    width, heads = settings.size("hidden_size"), settings.size("num_heads")
    layers = settings.layers("num_layers")
    activation = settings.text("activation_function", "gelu_new")
    local = _local_layers(settings, layers)
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("intermediate_size", 4 * width),
        "layers": layers,
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.head_width(width, heads),
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "maximum_positions": settings.size("max_position_embeddings"),
        "window": settings.size("window_size", 256) if local else None,
        "windowed_layers": local,
        "attention_multiplier": 1.0,
        "activation": settings.activation(activation),
        "gated": False,
        "biases": "out_mlp",
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def _local_layers(settings: HuggingFaceSettings, layers: int) -> tuple[int, ...]:
    """Reads the layers with a window; `attention_types` repeats patterns of kinds."""
    kinds: list[Any] = []
    for entry in settings.sequence("attention_types", [[["global", "local"], 12]]):
        match entry:
            case [list(pattern), int(count)] if 0 < count <= layers:
                kinds += pattern * count
            case _:
                settings.refuse("attention_types", "a list of [[kind, ...], number]")
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        expected = f"{layers} kinds in all, each 'global' or 'local'"
        settings.refuse("attention_types", expected)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "local")


GPT_NEO = Family(
    model_type="gpt_neo",
    title="GPT-Neo",
    read_fields=_read_gpt_neo,
    recipes=functools.partial(
        layout_recipes,
        modules=PROJECTIONS,
        norms=NORMS,
        outside=POSITIONS,
        **OUTSIDE,
    ),
    embedding_tables=("transformer.wte.weight", "wte.weight"),
    base_prefix=PREFIX,
    class_layers=ClassLayers(token_rows="classifier"),
    inert={
        *("resid_dropout", "embed_dropout", "attention_dropout"),
        *("classifier_dropout", "initializer_range", "use_cache"),
        "attention_layers",  # derived from attention_types
    },
)
