"""Names of tensors and settings that Llama shares with most decoder-only families.

Linear layers are stored `[out, in]`, as in all families except GPT-2. The choices in
`ModelConfig` determine which tensors a layer has.
"""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import FusedPart, Recipe, layered
from prompt_tuning.core.layer_kinds import layers_with
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import family
from prompt_tuning.families.family import LayerNames, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.rotary_settings import read_rotary

PREFIX = "model."
TABLES = ("model.embed_tokens.weight", "embed_tokens.weight")
PROJECTIONS = {
    "self_attention/query": "self_attn.q_proj",
    "self_attention/key": "self_attn.k_proj",
    "self_attention/value": "self_attn.v_proj",
    "self_attention/out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
BEFORE, AFTER, BEFORE_MLP, AFTER_MLP = (
    f"{name}_layernorm"
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)
NORMS = {
    "before": {"self_attention_norm": BEFORE, "mlp_norm": AFTER},
    "after": {"self_attention_out_norm": AFTER, "mlp_out_norm": AFTER_MLP},
    "around": {
        "self_attention_norm": BEFORE,
        "self_attention_out_norm": AFTER,
        "mlp_norm": BEFORE_MLP,
        "mlp_out_norm": AFTER_MLP,
    },
}
QUERY_KEY_NORMS = {
    "self_attention/query_norm": "self_attn.q_norm",
    "self_attention/key_norm": "self_attn.k_norm",
}

INERT = {"initializer_range", "use_cache", "attention_dropout", "pretraining_tp"}
"""Settings of these families that change no logits outside of training."""


def read_layout(
    settings: HuggingFaceSettings,
    *,
    activation: str = "hidden_act",
    tied: bool = False,
    head_width: int | None = None,
    divided: bool = False,
    feed_forward: str = "intermediate_size",
    layers: int | None = None,
    epsilon: float = 1e-6,
) -> ModelFields:
    """Returns the fields of `ModelConfig` from settings with Llama's names.

    Args:
      settings: the settings in `config.json`.
      activation: name of the activation's setting.
      tied: whether the head is tied by default.
      head_width: default of `head_dim`; if None, the width divided by the number of
        heads.
      divided: whether heads divide the width evenly, and there is no `head_dim`.
      feed_forward: name of the setting for the width of feed-forward layers.
      layers: number of layers, if not in `num_hidden_layers`.
      epsilon: default of `rms_norm_eps`.
    """
    heads, width = settings.size("num_attention_heads"), settings.size("hidden_size")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size(feed_forward),
        "layers": layers or settings.layers("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": settings.size("num_key_value_heads", heads),
        "head_width": settings.head_width(width, heads)
        if divided
        else settings.size("head_dim", head_width or width // heads),
        "norm": "rms",
        "norm_epsilon": settings.positive("rms_norm_eps", epsilon),
        "positions": "rotary",
        "maximum_positions": settings.integer("max_position_embeddings", minimum=1),
        "activation": settings.activation(settings.text(activation, "silu")),
        "gated": True,
        "biases": "none",
        "tied_head": settings.flag("tie_word_embeddings", tied),
    }


def read_rotated(
    settings: HuggingFaceSettings,
    *,
    base: float = 10_000.0,
    partial: float | None = None,
    **layout: Any,
) -> ModelFields:
    """Returns the fields of `read_layout` and of `read_rotary`."""
    fields = read_layout(settings, **layout)
    rotary = read_rotary(settings, fields["head_width"], base=base, partial=partial)
    return fields | rotary


def read_biases(settings: HuggingFaceSettings) -> str:
    """Returns the biases that `attention_bias` and `mlp_bias` choose."""
    attention = settings.flag("attention_bias", False)
    feed_forward = settings.flag("mlp_bias", False)
    if attention and feed_forward:
        return "all"
    return "attention" if attention else "mlp" if feed_forward else "none"


def layout_recipes(
    config: ModelConfig,
    names: StoredNames,
    *,
    fused: Mapping[str, tuple[str, FusedPart]] | None = None,
    modules: Mapping[str, str] = PROJECTIONS,
    norms: Mapping[str, str] | None = None,
    query_key_norms: Mapping[str, str] = QUERY_KEY_NORMS,
    others: LayerNames | None = None,
    base: str = PREFIX,
    prefix: str | None = None,
    table: str = "embed_tokens",
    layers: str = "layers",
    final_norm: str = "norm",
    head: str = "lm_head.weight",
    outside: Mapping[str, str] | None = None,
) -> Recipes:
    """Returns the recipes of all parameters of a decoder-only model.

    Args:
      config: config of the model.
      names: names of the stored tensors.
      fused: module and part of the projections that are stored together.
      modules: module of each projection, if not as in Llama.
      norms: module of each norm in a layer, if not as in Llama.
      query_key_norms: modules of the norms of queries and keys, if there are any.
      others: names of more tensors in a layer.
      base: prefix of the base model, which folders of a base model omit.
      prefix: prefix of all names except the head's, if not the base model's or none.
      table: module of the embedding table.
      layers: module of all layers.
      final_norm: module of the norm after the layers.
      head: stored name of an untied head.
      outside: names of more tensors outside of the layers and the head, by our paths.
    """
    if prefix is None:
        prefix = "" if f"{table}.weight" in names else base
    norms = norms or NORMS[config.norm_placement]
    if config.query_key_norm != "none":
        norms = {**norms, **query_key_norms}
    absent = {"mlp/gate"} if not config.gated else set()
    absent |= {"mlp_norm"} if config.shared_norm else set()
    norms, modules = (
        {ours: name for ours, name in names_of.items() if ours not in absent}
        for names_of in (norms, modules)
    )
    layer = family.norm_names(config, norms) | family.projection_names(
        config, modules, fused
    )
    layer |= others or {}
    tables = {"token_embedder/embedding": f"{table}.weight", **(outside or {})}
    stem = f"{prefix}{layers}.{{}}."
    return {
        **{path: Recipe((f"{prefix}{name}",)) for path, name in tables.items()},
        **{
            f"decoder/layers/{path}": layered(
                stem + name, layers_with(config, path), transform
            )
            for path, (name, transform) in layer.items()
        },
        **family.final_norm_recipes(config, "decoder", f"{prefix}{final_norm}"),
        **family.head_recipe(config, head),
    }
