"""The `config.json` of a GGUF file, made from its metadata."""

import math
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.quantized.gguf_tensors import open_tensors
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import GgufFile
from prompt_tuning.core.rotary_scaling import RotaryDivisors
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.families.gguf.architecture import Architecture, Fields
from prompt_tuning.families.gguf.architectures import ARCHITECTURES, MIXTRAL
from prompt_tuning.families.hf_settings import HuggingFaceSettings

ARCHITECTURE = "general.architecture"
PARTS = "split.count"
"""Field of the number of files that a model is divided into."""
TABLE = "token_embd.weight"
HEAD = "output.weight"
FREQUENCIES, SHORT, LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
ROTARY = (FREQUENCIES, SHORT, LONG)
"""Tensors with divisors of the rotary frequencies."""
BESIDE = "put the model's config.json beside the file, which is then followed instead"
HARMLESS: dict[str, tuple[float | bool, ...]] = {
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("attention.max_alibi_bias", "expert_count"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_weights_scale"), (0, 1)),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
}
"""Fields that change the logits, with the values that do not."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn, or a message."""


def find_architecture(file: GgufFile) -> tuple[Architecture, Fields]:
    """Returns the architecture of a file, and its fields.

    Raises:
      InputError: for an unsupported architecture, or only a part of a model.
    """
    metadata = file.metadata
    name = metadata.text(ARCHITECTURE)
    if metadata.integer(PARTS, 1) > 1:
        metadata.refuse(PARTS, "one file: join them by llama-gguf-split --merge")
    if name not in ARCHITECTURES:
        metadata.refuse(
            ARCHITECTURE,
            f"one of {', '.join(ARCHITECTURES)}; use the Hugging Face folder that "
            "the file was made from",
        )
    prefix = f"{name}."
    values = {
        key.removeprefix(prefix): value
        for key, value in metadata.values.items()
        if key.startswith(prefix)
    }
    fields = Fields(JsonObject(f"the fields {prefix}* of {file.path}", values), file)
    experts = name == "llama" and fields.values.integer("expert_count", 0)
    return MIXTRAL if experts else ARCHITECTURES[name], fields


def make_settings(file: GgufFile) -> HuggingFaceSettings:
    """Returns the settings that the `config.json` of a model would have.

    Raises:
      InputError: for an unsupported architecture, or missing or unsupported fields.
    """
    architecture, fields = find_architecture(file)
    values = fields.values
    if TABLE not in file.tensors:
        raise InputError(f"{file.path} has no tensor {TABLE}, the embedding table")
    for key, harmless in HARMLESS.items():
        if key in architecture.changes or key not in values:
            continue
        if values.value(key) not in harmless:
            values.refuse(key, f"none: it is not implemented here; {BESIDE}")
    settings: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": file.tensors[TABLE].shape[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        **{ours: values.value(key, None) for key, ours in architecture.sizes.items()},
        **_rotary_scaling(fields),
        **_token_ids(file.metadata),
        **architecture.settings(fields),
    }
    return HuggingFaceSettings(f"the metadata of {file.path}", settings)


def check_model_type(file: GgufFile, config: HuggingFaceSettings) -> None:
    """Checks that the `config.json` next to a file is for its model.

    Raises:
      InputError: if it is for another family.
    """
    architecture, _ = find_architecture(file)
    families = (architecture.model_type, *architecture.also)
    if config.text("model_type") not in families:
        expected = " or ".join(map(repr, families))
        config.refuse(
            "model_type",
            f"{expected} beside {file.path}: leave the config.json out, and the file's "
            "metadata is read",
        )


def _token_ids(metadata: JsonObject) -> dict[str, Any]:
    ids = {
        name: metadata.integer(f"tokenizer.ggml.{name}_token_id", None)
        for name in ("bos", "padding", *ENDS)
    }
    ends = [ids[name] for name in ENDS if ids[name] is not None]
    return {
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
        "eos_token_id": list(dict.fromkeys(ends)) or None,
    }


def _rotary_scaling(fields: Fields) -> dict[str, Any]:
    values, prefix = fields.values, "rope.scaling."
    old = values.number("rope.scale_linear", 1.0)
    kind = values.text(f"{prefix}type", "none" if old == 1 else "linear")
    if fields.has(SHORT):
        kind = "longrope"
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn", "longrope"):
        values.refuse(f"{prefix}type", f"none, linear, yarn or longrope; {BESIDE}")
    original = values.integer(f"{prefix}original_context_length", None)
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "linear":
        scaling["factor"] = values.number(f"{prefix}factor", old)
    elif kind == "yarn":
        scaling |= {
            "factor": values.number(f"{prefix}factor"),
            "original_max_position_embeddings": original,
            "beta_fast": values.number(f"{prefix}yarn_beta_fast", 32.0),
            "beta_slow": values.number(f"{prefix}yarn_beta_slow", 1.0),
        }
        for name in ("attn_factor", "yarn_attn_factor"):
            if values.number(f"{prefix}{name}", 1.0) != 1:
                values.refuse(f"{prefix}{name}", f"1; {BESIDE}")
    else:
        factors = {name: _vector(fields.file, name) for name in (SHORT, LONG)}
        scaling |= {
            "short_factor": factors[SHORT],
            "long_factor": factors[LONG],
            "original_max_position_embeddings": original,
            "attention_factor": values.number(f"{prefix}attn_factor", None),
        }
    return {"rope_scaling": scaling}


def _vector(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise InputError(f"{file.path} has no tensor {name}, which LongRoPE needs")
    tensor = open_tensors(file)[name]
    if len(tensor.shape) != 1 or tensor.size > 2**16:
        raise InputError(
            f"{file.path}: the tensor {name} has the shape {tensor.shape}, expected a "
            "divisor for each rotary frequency"
        )
    numbers = tensor.read().astype(np.float64).tolist()
    wrong = [number for number in numbers if not 0 < number < math.inf]
    if wrong:
        raise InputError(
            f"{file.path}: the tensor {name} has the number {shown(wrong[0])}, "
            "expected positive ones"
        )
    return numbers


def rotary_divisors(file: GgufFile, rotated: int) -> dict[str, Any]:
    """Returns the field of `ModelConfig` that a table of divisors replaces (Llama 3).

    Raises:
      InputError: unless there is one for each pair of a head's `rotated` elements.
    """
    if FREQUENCIES not in file.tensors:
        return {}
    divisors = _vector(file, FREQUENCIES)
    if len(divisors) != rotated // 2:
        raise InputError(
            f"{file.path}: the tensor {FREQUENCIES} has {len(divisors)} numbers, "
            f"expected {rotated // 2}, half of the rotated elements of a head"
        )
    return {"rotary_scaling": RotaryDivisors(divisors=tuple(divisors))}
