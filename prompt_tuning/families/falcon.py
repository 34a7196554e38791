"""Falcon: attention and feed-forward layer in parallel, few key/value heads, fused."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.bloom import BLOOM, OUTSIDE, PROJECTIONS, QKV
from prompt_tuning.families.family import Recipes, StoredNames, fused_in_groups
from prompt_tuning.families.gpt_neox import NORMS
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import layout_recipes
from prompt_tuning.families.rotary_settings import read_rotary

TWO_NORMS = {"self_attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def _read_falcon(settings: HuggingFaceSettings) -> ModelFields:
    reason = "the biases of Falcon RW, rounded to bfloat16, are not implemented"
    settings.require("alibi", False, reason)
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    head_width = settings.head_width(width, heads)
    new = settings.flag("new_decoder_architecture", False)
    groups = settings.size("num_kv_heads", heads)
    if not new:
        groups = 1 if settings.flag("multi_query", True) else heads
    parallel = settings.flag("parallel_attn", True)
    if new and not parallel:
        expected = "True: that variant of Falcon is not implemented"
        settings.refuse("parallel_attn", expected)
    norms = settings.integer("num_ln_in_parallel_attn", 2 if new else 1, minimum=1)
    if norms > 1 + new:
        settings.refuse("num_ln_in_parallel_attn", "1 or 2" if new else "1")
    return read_rotary(settings, head_width) | {
        "architecture": "decoder_only",
        "vocabulary_size": settings.size("vocab_size"),
        "width": width,
        "feed_forward_width": settings.size("ffn_hidden_size", 4 * width),
        "layers": settings.layers("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": groups,
        "head_width": head_width,
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "parallel": parallel,
        "shared_norm": parallel and norms == 1,
        "positions": "rotary",
        "maximum_positions": settings.size("max_position_embeddings", 2048),
        "activation": settings.activation(settings.text("activation", "gelu")),
        "gated": False,
        "biases": "all" if settings.flag("bias", False) else "none",
        "tied_head": settings.flag("tie_word_embeddings", True),
    }


def _falcon_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    norms = TWO_NORMS if config.parallel and not config.shared_norm else NORMS
    fused = fused_in_groups(config, QKV)
    return layout_recipes(
        config, names, fused=fused, modules=PROJECTIONS, norms=norms, **OUTSIDE
    )


def cached_heads(config: ModelConfig) -> int:
    """Returns the number of heads in the cache, which repeats a group for its queries.

    A single group is not repeated.
    """
    return 1 if config.key_value_heads == 1 else config.heads


FALCON = BLOOM.like(
    "falcon",
    "Falcon 7B, 40B, 180B and Falcon 2",
    _read_falcon,
    recipes=_falcon_recipes,
    cached_heads=cached_heads,
    inert={"hidden_dropout", "attention_dropout", "initializer_range", "use_cache"},
)
