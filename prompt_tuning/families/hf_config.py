"""The `config.json` of a Hugging Face model as our config.

Families: Llama, Qwen2, GPT-2 and T5 (1.0 and 1.1), as transformers 4 and 5 write them.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig, RotaryScaling

T5_TABLES = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
EMBEDDING_TABLES = (
    *T5_TABLES,
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
TOKEN_IDS = {
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "pad_id": "pad_token_id",
    "decoder_start_id": "decoder_start_token_id",
}

SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
"""What Gemma 2 caps its scores by; a config of any family may name them."""


class Settings:
    """The settings of a `config.json`, with errors that name the file.

    Attributes:
      file: the file.
      raw: what it holds.
    """

    def __init__(self, file: Path):
        self.file = file
        try:
            self.raw = json.loads(file.read_bytes())
        except FileNotFoundError as error:
            raise InputError(
                f"{file} is missing; expected the folder of a Hugging Face model"
            ) from error
        except ValueError as error:
            raise InputError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(self.raw, dict):
            raise InputError(f"{file} holds JSON that is not an object")

    def required(self, name: str):
        """A setting that has no default."""
        if self.raw.get(name) is None:
            raise InputError(f"{self.file} has no {name!r}, which the model needs")
        return self.raw[name]

    def optional(self, name: str, default):
        """A setting, or the default that transformers gives it."""
        found = self.raw.get(name)
        return default if found is None else found

    def refuse(self, name: str, default, reason: str) -> None:
        """Raises `InputError` if a setting has another value than its default."""
        if self.optional(name, default) != default:
            raise InputError(
                f"{self.file} has {name} = {self.raw[name]!r}, expected {default!r}: "
                f"{reason}"
            )

    def activation(self, name: str) -> str:
        """Our name of an activation."""
        if name not in ACTIVATIONS:
            raise InputError(
                f"{self.file} has the activation {name!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]


def read_config(folder: str | Path, **overrides) -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` for ids that it lacks.

    Whether the head is tied is decided with the checkpoint in view: an `lm_head.weight`
    that repeats the embedding table is tied to it. Dropout rates are not read: a frozen
    model has none unless `dropout_rate` asks for it.

    Args:
      folder: the model's folder.
      **overrides: fields of `ModelConfig` that replace what the files say; with
        `tied_head` the checkpoint is not opened.

    Raises:
      InputError: for a missing file or setting, for a `model_type`, activation or rope
        type that is not known, and for a choice that our models cannot express.
    """
    settings = Settings(Path(folder) / "config.json")
    family = settings.required("model_type")
    if family not in FAMILIES:
        raise InputError(
            f"{settings.file} has model_type {family!r}, expected one of "
            f"{', '.join(FAMILIES)}"
        )
    for name in SOFT_CAPS:
        reason = "scores are not capped by any of our models; Gemma's are not read"
        settings.refuse(name, None, reason)
    fields = FAMILIES[family](settings) | _token_ids(settings, overrides)
    if "tied_head" not in overrides:
        fields["tied_head"] = _has_tied_head(settings, fields, open_safetensors(folder))
    return ModelConfig(**(fields | overrides))


def _token_ids(settings: Settings, overrides: Collection[str]) -> dict[str, Any]:
    generation_file = settings.file.with_name("generation_config.json")
    sources = [settings]
    if generation_file.exists():
        sources.append(Settings(generation_file))
    ids = {}
    for field, name in TOKEN_IDS.items():
        found = [s.raw[name] for s in sources if s.raw.get(name) is not None]
        if not found or field in overrides:
            continue
        if not isinstance(found[0], int):
            raise InputError(
                f"{settings.file} or {generation_file.name} has {name} = {found[0]!r}, "
                f"expected one token; choose one, by Pretrained.eos_id for the end"
            )
        ids[field] = found[0]
    return ids


def _has_tied_head(
    settings: Settings, fields: dict[str, Any], stored: dict[str, StoredTensor]
) -> bool:
    declared, is_t5 = fields["tied_head"], fields["architecture"] == "encoder_decoder"
    if "lm_head.weight" not in stored:
        # transformers 5 ties every T5; only a head in the checkpoint unties it.
        return declared or is_t5
    table = next((name for name in EMBEDDING_TABLES if name in stored), None)
    if not declared or table is None:
        return False
    head, embedding = stored["lm_head.weight"], stored[table]
    if head.shape == embedding.shape and np.array_equal(head.read(), embedding.read()):
        return True
    if is_t5 and not fields["scale_tied_hidden"]:
        return False
    raise InputError(
        f"{settings.file} ties the head to the embedding table, but lm_head.weight in "
        f"{head.source} differs from {table}; choose with tied_head=True or False"
    )


def _rotary(settings: Settings) -> dict[str, Any]:
    """Base and scaling, from transformers 5's `rope_parameters` or older settings."""
    base, scaling = settings.optional("rope_theta", 10_000.0), None
    settings.refuse("partial_rotary_factor", 1.0, "all of a head is rotated")
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.optional(name, {})
        base = rope.get("rope_theta", base)
        scaling = _rotary_scaling(settings, name, rope) or scaling
    return {"rotary_base": float(base), "rotary_scaling": scaling}


def _rotary_scaling(settings: Settings, name: str, rope: dict) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RotaryScaling(factor=float(rope["factor"]))
        if kind == "llama3":
            return RotaryScaling(
                factor=float(rope["factor"]),
                low_frequency_factor=float(rope["low_freq_factor"]),
                high_frequency_factor=float(rope["high_freq_factor"]),
                original_positions=rope["original_max_position_embeddings"],
            )
    except KeyError as missing:
        raise InputError(
            f"{settings.file} has the rope_type {kind!r} in {name} without {missing}"
        ) from None
    raise InputError(
        f"{settings.file} has the rope_type {kind!r} in {name}, expected 'default', "
        "'linear' or 'llama3'; others are not implemented"
    )


def _llama(settings: Settings) -> dict[str, Any]:
    attention = settings.optional("attention_bias", False)
    if attention != settings.optional("mlp_bias", False):
        raise InputError(
            f"{settings.file} has only one of attention_bias and mlp_bias; "
            "expected both or neither"
        )
    heads = settings.required("num_attention_heads")
    width = settings.required("hidden_size")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.required("vocab_size"),
        "width": width,
        "feed_forward_width": settings.required("intermediate_size"),
        "layers": settings.required("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": settings.optional("num_key_value_heads", heads),
        "head_width": settings.optional("head_dim", width // heads),
        "norm": "rms",
        "norm_epsilon": settings.optional("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "maximum_positions": settings.required("max_position_embeddings"),
        **_rotary(settings),
        "activation": settings.activation(settings.optional("hidden_act", "silu")),
        "gated": True,
        "biases": "all" if attention else "none",
        "tied_head": settings.optional("tie_word_embeddings", False),
    }


def _qwen2(settings: Settings) -> dict[str, Any]:
    reason = "sliding windows are not implemented"
    settings.refuse("use_sliding_window", False, reason)
    layers = settings.required("num_hidden_layers")
    settings.refuse("layer_types", ["full_attention"] * layers, reason)
    return _llama(settings) | {"biases": "qkv"}


def _gpt2(settings: Settings) -> dict[str, Any]:
    reason = "that variant of GPT-2 is not implemented"
    settings.refuse("scale_attn_by_inverse_layer_idx", False, reason)
    settings.refuse("add_cross_attention", False, reason)
    width, heads = settings.required("n_embd"), settings.required("n_head")
    return {
        "architecture": "decoder_only",
        "vocabulary_size": settings.required("vocab_size"),
        "width": width,
        "feed_forward_width": settings.optional("n_inner", 4 * width),
        "layers": settings.required("n_layer"),
        "heads": heads,
        "key_value_heads": heads,
        "head_width": width // heads,
        "norm": "layer",
        "norm_epsilon": settings.optional("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "maximum_positions": settings.required("n_positions"),
        "activation": settings.activation(
            settings.optional("activation_function", "gelu_new")
        ),
        "gated": False,
        "biases": "all",
        "tied_head": settings.optional("tie_word_embeddings", True),
        "scale_scores": settings.optional("scale_attn_weights", True),
    }


def _t5(settings: Settings) -> dict[str, Any]:
    feed_forward = settings.optional("feed_forward_proj", "relu")
    gated = feed_forward.startswith("gated-")
    activation = feed_forward.removeprefix("gated-")
    if feed_forward == "gated-gelu":
        # T5 1.1 is named so, but was trained with the tanh approximation.
        activation = "gelu_new"
    layers, heads = settings.required("num_layers"), settings.required("num_heads")
    tied = settings.optional("tie_word_embeddings", True)
    return {
        "architecture": "encoder_decoder",
        "vocabulary_size": settings.required("vocab_size"),
        "width": settings.required("d_model"),
        "feed_forward_width": settings.required("d_ff"),
        "layers": settings.optional("num_decoder_layers", layers),
        "encoder_layers": layers,
        "heads": heads,
        "key_value_heads": heads,
        "head_width": settings.required("d_kv"),
        "norm": "rms",
        "norm_epsilon": settings.optional("layer_norm_epsilon", 1e-6),
        "positions": "relative",
        "relative_buckets": settings.required("relative_attention_num_buckets"),
        "relative_maximum_distance": settings.optional(
            "relative_attention_max_distance", 128
        ),
        "activation": settings.activation(activation),
        "gated": gated,
        "tied_head": tied,
        "scale_tied_hidden": settings.optional("scale_decoder_outputs", tied),
        "scale_scores": False,
    }


FAMILIES: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "gpt2": _gpt2,
    "t5": _t5,
}
