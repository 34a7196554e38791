"""The supported GGUF architectures.

The names are from `gguf-py/gguf/constants.py` in llama.cpp; changes by its conversion
scripts are undone. Where no field has a setting, it comes from llama.cpp's code.
"""

import functools
from typing import Any

from prompt_tuning.core.errors import shown
from prompt_tuning.families.gguf.architecture import (
    MODULES,
    SIZES,
    TABLES,
    Architecture,
    Fields,
)

QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LAYER_EPSILON = "attention.layer_norm_epsilon"
PARALLEL = "use_parallel_residual"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
WINDOW = "attention.sliding_window"
GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_LARGEST = {46: "2", 62: "3"}
"""Layers of the models of Gemma 2 and 3 with 27 billion weights."""


def _biases(fields: Fields) -> dict[str, Any]:
    return {
        "attention_bias": fields.has("blk.0.attn_output.bias"),
        "mlp_bias": fields.has("blk.0.ffn_up.bias"),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    # Files of Llama 1 and 2 have the width of a head only as the rotated one.
    return _biases(fields) | {
        "head_dim": fields.values.integer("rope.dimension_count", fields.head_width)
    }


def _mixtral(fields: Fields) -> dict[str, Any]:
    return {
        "num_local_experts": fields.values.integer("expert_count"),
        "num_experts_per_tok": fields.values.integer("expert_used_count"),
        "head_dim": fields.head_width,
    }


def _qwen_experts(fields: Fields) -> dict[str, Any]:
    values = fields.values
    width = "expert_feed_forward_length"
    return {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer(width, _rows(fields, "ffn_up_exps")),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": _rows(fields, "ffn_up_shexp"),
    }


def _qwen3_experts(fields: Fields) -> dict[str, Any]:
    return _qwen_experts(fields) | {"norm_topk_prob": True}


def _olmoe(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields.values.integer("expert_count"),
        "num_experts_per_tok": fields.values.integer("expert_used_count"),
    }


def _rows(fields: Fields, module: str) -> int | None:
    tensor = fields.file.tensors.get(f"blk.0.{module}.weight")
    return None if tensor is None or len(tensor.shape) < 2 else tensor.shape[-2]


def _soft_caps(fields: Fields) -> dict[str, Any]:
    return {name: fields.values.number(name, None) for name in SOFT_CAPS}


def _gemma_windows(fields: Fields, generation: str) -> dict[str, Any]:
    values, divisor = fields.values, fields.head_width
    if GEMMA_LARGEST.get(values.integer("block_count")) == generation:
        heads = values.integer("attention.head_count", minimum=1)
        divisor = values.integer("embedding_length") // heads
    return _soft_caps(fields) | {
        "query_pre_attn_scalar": divisor,
        "sliding_window": values.integer(WINDOW, None),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    local = fields.values.number("rope.freq_base_swa", 10_000.0)
    return _gemma_windows(fields, "3") | {"rope_local_base_freq": local}


def _phi3(fields: Fields) -> dict[str, Any]:
    original = "rope.scaling.original_context_length"
    return {
        "sliding_window": fields.values.integer(WINDOW, 0),
        "partial_rotary_factor": fields.rotated_part(),
        "original_max_position_embeddings": fields.values.integer(original, None),
    }


def _phi2(fields: Fields) -> dict[str, Any]:
    return {"partial_rotary_factor": fields.rotated_part()}


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    return {
        "rotary_pct": fields.rotated_part(),
        "use_parallel_residual": fields.values.flag(PARALLEL, True),
    }


def _stablelm(fields: Fields) -> dict[str, Any]:
    # The field is true for all models; only those with one norm compute in parallel.
    return {
        "partial_rotary_factor": fields.rotated_part(),
        "use_parallel_residual": not fields.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": fields.has("blk.0.attn_q.bias"),
    }


def _starcoder2(fields: Fields) -> dict[str, Any]:
    return {"use_bias": fields.has("blk.0.attn_q.bias"), "sliding_window": 0}


def _olmo2(fields: Fields) -> dict[str, Any]:
    if fields.values.integer(WINDOW, 0):
        fields.values.refuse(WINDOW, f"none: {shown('olmo3')} is not read from GGUF")
    return _biases(fields)


def _granite(fields: Fields) -> dict[str, Any]:
    number = fields.values.number
    width = fields.head_width**-0.5
    return _biases(fields) | {
        "attention_multiplier": number("attention.scale", width),
        "embedding_multiplier": number("embedding_scale", 1.0),
        "residual_multiplier": number("residual_scale", 1.0),
        "logits_scaling": number("logit_scale", 1.0),
    }


def _cohere(fields: Fields) -> dict[str, Any]:
    return {
        "attention_bias": fields.has("blk.0.attn_q.bias"),
        "use_qk_norm": fields.has("blk.0.attn_q_norm.weight"),
        "logit_scale": fields.values.number("logit_scale"),
    }


EXPERTS = ("expert_count", "expert_used_count")
QWEN_EXPERTS = {
    f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj"
    for part in ("gate", "up", "down")
}
LLAMA = Architecture(
    model_type="llama", also=("mistral", "ministral"), settings=_llama, permuted=True
)
MIXTRAL = Architecture(
    model_type="mixtral",
    settings=_mixtral,
    changes=EXPERTS,
    modules={**MODULES, "ffn_gate_inp": "block_sparse_moe.gate"},
    permuted=True,
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
)
"""It also has the name `llama`; the number of experts tells them apart."""
GPT_NEOX_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
GPT2_MODULES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3", modules={**MODULES, **QK_NORMS}),
    "gemma": Architecture(model_type="gemma", norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2",
        settings=functools.partial(_gemma_windows, generation="2"),
        changes=SOFT_CAPS,
        modules={**MODULES, **GEMMA_NORMS},
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        settings=_gemma3,
        changes=SOFT_CAPS,
        modules={**MODULES, **GEMMA_NORMS, **QK_NORMS},
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        model_type="phi3",
        settings=_phi3,
        modules={
            **MODULES,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        sizes={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            LAYER_EPSILON: "layer_norm_epsilon",
        },
        tables={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h.{}.",
        modules=GPT2_MODULES,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        sizes={
            **{k: v for k, v in SIZES.items() if k != "rope.freq_base"},
            "rope.freq_base": "rotary_emb_base",
            LAYER_EPSILON: "layer_norm_eps",
        },
        settings=_gpt_neox,
        changes=(PARALLEL,),
        tables={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layers="gpt_neox.layers.{}.",
        modules=GPT_NEOX_MODULES,
        by_part="attn_qkv",
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        sizes={**SIZES, LAYER_EPSILON: "norm_epsilon"},
        settings=_starcoder2,
        modules={**MODULES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "phi2": Architecture(
        model_type="phi",
        sizes={**SIZES, LAYER_EPSILON: "layer_norm_eps"},
        settings=_phi2,
        tables={**TABLES, "output_norm": "model.final_layernorm"},
        modules={
            **MODULES,
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "stablelm": Architecture(
        model_type="stablelm",
        sizes={**SIZES, LAYER_EPSILON: "layer_norm_eps"},
        settings=_stablelm,
        changes=(PARALLEL,),
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        settings=_olmo2,
        modules={
            **MODULES,
            **QK_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granite": Architecture(
        model_type="granite",
        settings=_granite,
        changes=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        permuted=True,
    ),
    "command-r": Architecture(
        model_type="cohere",
        sizes={**SIZES, LAYER_EPSILON: "layer_norm_eps"},
        settings=_cohere,
        changes=("logit_scale",),
        modules={**MODULES, **QK_NORMS},
    ),
    "smollm3": Architecture(model_type="smollm3", settings=_biases, permuted=True),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        settings=_qwen_experts,
        changes=EXPERTS,
        modules={
            **MODULES,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        experts=QWEN_EXPERTS,
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        settings=_olmoe,
        changes=EXPERTS,
        modules={**MODULES, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        experts=QWEN_EXPERTS,
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        settings=_qwen3_experts,
        changes=EXPERTS,
        modules={**MODULES, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        experts=QWEN_EXPERTS,
    ),
}
"""Architectures by `general.architecture`."""
