"""Every setting that transformers has for a family is read or known to be inert."""

# transformers is only in the `bench` extra.
# pyright: reportMissingImports=false

import copy
import inspect
from typing import Any, ClassVar

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.families import FAMILIES
from prompt_tuning.families.hf_folder import EOS, TOKEN_IDS
from prompt_tuning.families.hf_settings import HuggingFaceSettings

COMMON = {*TOKEN_IDS.values(), EOS, "model_type", "quantization_config"}
"""Settings that the reader of all families reads."""
DERIVED = {
    *("_sliding_window_pattern", "transformers_version", "_name_or_path"),
    "output_attentions",
}
"""Settings that transformers writes and does not read, or that change no logits."""
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 48},
    "original_max_position_embeddings": 4096,
}
OPTIONS = {
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "qwen2_moe": WINDOWS,
    "qwen3_moe": WINDOWS,
    "smollm3": WINDOWS,
    "phi3": LONGROPE,
    "exaone4": {"layer_types": None},
    "falcon_h1": {
        **{"mamba_d_ssm": None, "mamba_d_head": "auto"},
        **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    },
    "qwen3_next": {"decoder_sparse_step": 2},
}
"""Settings with which further settings are read."""
NEEDED = {
    "glm4_moe": {"head_dim": 128},
    "mbart": {"decoder_start_token_id": 2},
    "electra": {"embedding_size": 256},
    "deberta-v2": {
        **{"relative_attention": True, "share_att_key": True, "position_buckets": 256},
        **{"position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
        "norm_rel_ebd": "layer_norm",
    },
}
"""Settings without which transformers' defaults are no model."""
PARTS = {
    "llama4": ("text_config",),
    "gemma3": ("text_config",),
    "gemma4": ("text_config",),
    "mistral3": ("text_config",),
    "qwen3_5": ("text_config",),
    "qwen3_5_moe": ("text_config",),
    "qwen3_vl": ("text_config",),
    "qwen3_vl_moe": ("text_config",),
    "t5gemma": ("encoder", "decoder"),
}
"""Parts of `config.json` whose settings are read as well."""

pytestmark = pytest.mark.torch


class Recorded(HuggingFaceSettings):
    """Settings that record the names that are read."""

    names: ClassVar[set[str]] = set()

    def value(self, name, *default):
        self.names.add(name)
        return super().value(name, *default)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)


def own_settings(config):
    """Returns the settings of a family's class, without those of all classes."""
    import transformers

    common = inspect.signature(transformers.PretrainedConfig).parameters
    fields = {
        name
        for kind in type(config).__mro__
        if kind.__module__.startswith("transformers.models")
        for name in getattr(kind, "__annotations__", {})
    }
    return (fields | set(config.to_dict())) - set(common) - DERIVED


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_setting_is_read_or_inert(model_type):
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    family, known = FAMILIES[model_type], own_settings(config)
    parts = [own_settings(getattr(config, part)) for part in PARTS.get(model_type, ())]
    repeated = known & set().union(*parts)
    known = known.union(*parts)
    Recorded.names = set()
    for option in ({}, OPTIONS.get(model_type, {})):
        needed = NEEDED.get(model_type, {}) | option
        settings = Recorded("config.json", config.to_dict() | needed)
        assert family.read_fields(settings)["layers"]
    undecided = known - Recorded.names - family.inert - COMMON
    assert not undecided
    assert not (family.inert - repeated) & Recorded.names


def same_as_transformers(model_type, settings):
    """Returns whether settings are read like those that transformers makes of them."""
    import huggingface_hub
    import transformers

    refusals = (InputError, KeyError, huggingface_hub.errors.StrictDataclassError)
    kind = type(transformers.AutoConfig.for_model(model_type))
    try:
        ours = read(model_type, copy.deepcopy(settings))
        theirs = kind.from_dict(copy.deepcopy(settings)).to_dict()
    except refusals:
        return True
    return ours == read(model_type, theirs)


def read(model_type, settings):
    return FAMILIES[model_type].read_fields(
        HuggingFaceSettings("config.json", settings)
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_setting_has_the_default_of_transformers(model_type):
    import transformers

    full = transformers.AutoConfig.for_model(model_type).to_dict()
    # A wrong number of key/value heads disagrees with the shapes in the checkpoint.
    wrong = [
        name
        for name in full.keys() - {"num_key_value_heads"}
        if not same_as_transformers(
            model_type, {other: full[other] for other in full if other != name}
        )
    ]
    assert not wrong


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 3.0}
ROTARY: list[dict[str, Any]] = [
    {"rope_theta": 777.0},
    {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    {"rope_scaling": YARN},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.5, "rotary_emb_base": 333.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}
    | {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_local_base_freq": 555.0, "sliding_window_pattern": 3},
]
"""Rotary settings as transformers 4 and 5 write them, and mixtures of both."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rotary_settings_are_read_as_transformers_reads_them(model_type):
    import transformers

    full = transformers.AutoConfig.for_model(model_type).to_dict()
    rotary = full.pop("rope_parameters", None) is not None
    full.pop("layer_types", None)
    wrong = [
        settings
        for settings in ROTARY[: len(ROTARY) * rotary]
        # Of this family transformers 5 reads it for layers without a window only.
        if not (model_type == "olmo3" and "rope_theta" in settings)
        and not same_as_transformers(model_type, full | settings)
    ]
    assert not wrong


OLD_SCALING = {
    "rope_scaling": {"type": "linear", "factor": 3.0},
    "rope_parameters": None,
}


@pytest.mark.parametrize(
    ("model_type", "setting"),
    [
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma3_text", {"layer_types": ["chunked_attention"]}),
        ("gemma3_text", {"attn_logit_softcapping": 0.5}),
        ("gemma3_text", OLD_SCALING),
        ("olmo3", OLD_SCALING),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 4}),
        ("phi3", {"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}),
        ("mistral", {"layer_types": ["full_attention"]}),
        ("smollm3", {"no_rope_layers": [1]}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}),
        ("falcon", {"alibi": True}),
        ("bart", {"decoder_ffn_dim": 12}),
        ("bert", {"is_decoder": True}),
        ("electra", {"embedding_size": 128}),
        ("modernbert", {"norm_bias": True}),
        ("deberta-v2", {"conv_kernel_size": 3}),
        ("deberta-v2", {"share_att_key": False}),
        ("bart", {"tie_word_embeddings": False}),
        ("gpt_oss", {"swiglu_alpha": 1.5}),
        ("t5gemma", {"is_encoder_decoder": False}),
        ("t5gemma", {"decoder": {"hidden_size": 32}}),
        ("t5gemma", {"decoder": {"attn_logit_softcapping": None}}),
        ("bloom", {"apply_residual_connection_post_layernorm": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("qwen2_moe", {"decoder_sparse_step": 25}),
        ("qwen3_moe", {"mlp_only_layers": [*range(24)]}),
        ("granitemoehybrid", {"mamba_proj_bias": True}),
        ("glm4_moe", {"first_k_dense_replace": 46}),
        ("olmo", {"clip_qkv": 8.0}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("gptj", {"tie_word_embeddings": True}),
        ("phi", {"tie_word_embeddings": True}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rope_theta": 5.0}),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
    ],
    ids=str,
)
def test_a_setting_that_is_not_supported_is_refused_by_name(model_type, setting):
    import transformers

    full = transformers.AutoConfig.for_model(model_type).to_dict()
    settings = full | NEEDED.get(model_type, {}) | setting
    name = next(iter(setting))
    with pytest.raises(InputError, match=f"{name}.*expected"):
        FAMILIES[model_type].read_fields(HuggingFaceSettings("config.json", settings))
