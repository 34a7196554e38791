"""Writes a frozen model as an ordinary Hugging Face folder (Llama and T5 1.1).

The inverse of the reader in `prompt_tuning/checkpoints/huggingface.py`: one table per
family from our parameter paths to the tensor names of transformers. Our kernels are
`[in, out]` and stacked on layers; transformers' linears are `[out, in]`, one a layer.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig, check_dtype
from prompt_tuning.core.parameters import split
from prompt_tuning.models.build import build_model

Parameters = Mapping[str, np.ndarray]

LLAMA_WHOLE = {
    "token_embedder/embedding": "model.embed_tokens.weight",
    "head/kernel": "lm_head.weight",
    "decoder/final_norm/scale": "model.norm.weight",
}
LLAMA_LAYER = {
    "decoder/layers/self_attention_norm/scale": "input_layernorm",
    "decoder/layers/self_attention/query/kernel": "self_attn.q_proj",
    "decoder/layers/self_attention/key/kernel": "self_attn.k_proj",
    "decoder/layers/self_attention/value/kernel": "self_attn.v_proj",
    "decoder/layers/self_attention/out/kernel": "self_attn.o_proj",
    "decoder/layers/mlp_norm/scale": "post_attention_layernorm",
    "decoder/layers/mlp/gate/kernel": "mlp.gate_proj",
    "decoder/layers/mlp/up/kernel": "mlp.up_proj",
    "decoder/layers/mlp/down/kernel": "mlp.down_proj",
}
T5_WHOLE = {
    "token_embedder/embedding": "shared.weight",
    "head/kernel": "lm_head.weight",
    "encoder/final_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/final_norm/scale": "decoder.final_layer_norm.weight",
}
# Only the first block holds the table that all blocks of a stack add to their scores.
T5_BIAS = {
    f"{stack}/relative_position_bias/embedding": (
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    )
    for stack in ("encoder", "decoder")
}
_LETTERS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_MLP = {"gate": "wi_0", "up": "wi_1", "down": "wo"}


def _t5_layer(stack: str) -> dict[str, str]:
    """Our stacked paths of one stack to names inside `{stack}.block.{l}.layer`."""
    sublayers = [("self_attention", "SelfAttention", _LETTERS)]
    if stack == "decoder":
        sublayers.append(("cross_attention", "EncDecAttention", _LETTERS))
    sublayers.append(("mlp", "DenseReluDense", _MLP))
    names = {}
    for index, (ours, theirs, parts) in enumerate(sublayers):
        names[f"{stack}/layers/{ours}_norm/scale"] = f"{index}.layer_norm"
        for part, letter in parts.items():
            names[f"{stack}/layers/{ours}/{part}/kernel"] = f"{index}.{theirs}.{letter}"
    return names


def export_huggingface(
    folder: Path,
    config: ModelConfig,
    parameters: Parameters,
    *,
    dtype: str = "float32",
) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors`.

    Args:
      folder: where to write; created if it is not there.
      config: the model's; its `parameter_dtype` plays no part.
      parameters: every parameter by its slash-joined path.
      dtype: of the written weights, "float32" or "bfloat16".

    Raises:
      InputError: if the model is neither a Llama nor a T5 1.1, or `parameters` has a
        path too few or too many; for any other dtype.
    """
    check_dtype("dtype", dtype)
    if config.architecture == "encoder_decoder":
        settings, tensors = _t5_settings(config), _t5_tensors(parameters)
    else:
        settings, tensors = (
            llama_settings(config),
            _llama_tensors(parameters, tied=config.tied_head),
        )
    written = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    arrays = {
        name: np.ascontiguousarray(array, dtype=written) for name, array in tensors
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", settings | {"torch_dtype": dtype})
    generation = {
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "do_sample": False,
    }
    if config.architecture == "encoder_decoder":
        generation["decoder_start_token_id"] = config.decoder_start_id
    _write_json(folder / "generation_config.json", generation)


def export_random(folder: Path, config: ModelConfig) -> None:
    """Writes a model with random weights, as its initialisers draw them."""
    _, parameters = split(build_model(jax.random.key(0), config))
    arrays = {path: np.asarray(leaf) for path, leaf in parameters.items()}
    export_huggingface(folder, config, arrays)


def _llama_tensors(
    parameters: Parameters, *, tied: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each tensor of a Llama."""
    expected = LLAMA_WHOLE.keys() | LLAMA_LAYER.keys()
    _check_paths(parameters, expected - {"head/kernel"} if tied else expected)
    for path, array in parameters.items():
        if path in LLAMA_WHOLE:
            yield LLAMA_WHOLE[path], array
            continue
        for layer, slice_ in enumerate(array):
            yield f"model.layers.{layer}.{LLAMA_LAYER[path]}.weight", slice_.T


def _t5_tensors(parameters: Parameters) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of each tensor of a T5 1.1."""
    layers = {stack: _t5_layer(stack) for stack in ("encoder", "decoder")}
    expected = T5_WHOLE.keys() | T5_BIAS.keys()
    _check_paths(parameters, expected.union(*layers.values()))
    for path, array in parameters.items():
        if path in T5_WHOLE:
            yield T5_WHOLE[path], array
            continue
        if path in T5_BIAS:
            yield T5_BIAS[path], array.T
            continue
        stack = path.split("/")[0]
        for layer, slice_ in enumerate(array):
            name = f"{stack}.block.{layer}.layer.{layers[stack][path]}.weight"
            yield name, slice_.T


def _check_paths(parameters: Parameters, expected: set[str]) -> None:
    """Refuses a path too few or too many.

    Raises:
      InputError: with the paths.
    """
    missing = sorted(expected - parameters.keys())
    unknown = sorted(parameters.keys() - expected)
    if missing or unknown:
        raise InputError(
            f"the parameters lack {missing} and have {unknown}, which this export has "
            "no name for; it writes Llama and T5 1.1 models, without biases"
        )


def llama_settings(config: ModelConfig) -> dict:
    """`config.json` of a Llama, as `transformers.LlamaConfig` reads it.

    Raises:
      InputError: if the model is another decoder.
    """
    choices = (config.norm, config.positions, config.activation, config.biases)
    if choices != ("rms", "rotary", "silu", "none") or not config.gated:
        raise InputError(
            f"a decoder with norm, positions, activation and biases {choices} and "
            f"gated={config.gated} is no Llama; expected rms, rotary, silu, none, gated"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": config.maximum_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }


def _t5_settings(config: ModelConfig) -> dict:
    """`config.json` of a T5 1.1, as `transformers.T5Config` reads it.

    Raises:
      InputError: if the model is another encoder-decoder.
    """
    choices = (config.activation, config.gated, config.tied_head)
    if choices != ("gelu_tanh", True, False):
        raise InputError(
            f"an encoder-decoder with activation, gated and tied_head {choices} is no "
            "T5 1.1; expected gelu_tanh, True, False"
        )
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocabulary_size,
        "d_model": config.width,
        "d_ff": config.feed_forward_width,
        "d_kv": config.head_width,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.layers,
        "num_heads": config.heads,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": config.norm_epsilon,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_maximum_distance,
        "dropout_rate": config.dropout_rate,
        "tie_word_embeddings": False,
        "decoder_start_token_id": config.decoder_start_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
    }


def _write_json(path: Path, value: dict) -> None:
    """Writes indented JSON with a closing newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
