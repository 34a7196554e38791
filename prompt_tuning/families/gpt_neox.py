"""GPT-NeoX and Pythia: attention and feed-forward layer in parallel, fused per head."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.family import Family, Recipes, StoredNames, fused_in_groups
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import INERT, layout_recipes, read_layout
from prompt_tuning.families.rotary_settings import read_rotary

PREFIX = "gpt_neox."
HEAD = "embed_out.weight"
PROJECTIONS = {
    "self_attention/out": "attention.dense",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
NORMS = {
    "self_attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def _read_gpt_neox(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_layout(settings, divided=True)
    base = settings.positive("rotary_emb_base", 10_000.0)
    partial = settings.number("rotary_pct", 0.25, minimum=0, maximum=1)
    reason = "transformers reads rotary_emb_base and rotary_pct of this family"
    settings.require("rope_theta", base, reason)
    settings.require("partial_rotary_factor", partial, reason)
    width, name = fields["head_width"], "rotary_pct"
    rotary = read_rotary(settings, width, base=base, partial=partial, partial_name=name)
    return {
        **fields,
        **rotary,
        "key_value_heads": fields["heads"],
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-5),
        "parallel": settings.flag("use_parallel_residual", True),
        "activation": settings.activation(settings.text("hidden_act", "gelu")),
        "gated": False,
        "biases": "all" if settings.flag("attention_bias", True) else "mlp",
    }


def _gpt_neox_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    return layout_recipes(
        config,
        names,
        fused=fused_in_groups(config, "attention.query_key_value"),
        modules=PROJECTIONS,
        base=PREFIX,
        table="embed_in",
        final_norm="final_layer_norm",
        head=HEAD,
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX, Pythia",
    read_fields=_read_gpt_neox,
    recipes=_gpt_neox_recipes,
    embedding_tables=("gpt_neox.embed_in.weight", "embed_in.weight"),
    base_prefix=PREFIX,
    class_layers=ClassLayers(token_rows="classifier"),
    head_name=HEAD,
    inert=INERT | {"hidden_dropout", "classifier_dropout", "is_decoder"},
)
