"""Makes tiny random models and PEFT adapters, with their logits, for the family tests.

    python scripts/make_fixtures.py FAMILY... [--seed N] [--folder FOLDER]

For each family it writes a folder with

    base/         a Hugging Face model with random weights
    prompt_tuning/, prefix_tuning/, lora/, ia3/
                  PEFT adapters with random weights, where PEFT supports the kind
    ref.npz       three rows of unlike length; the logits of the base model and with
                  each adapter; the tokens that greedy decoding appends to each row,
                  in steps without a cache (see `scripts/peft_versions.py`)

The models are so small that windows, scalings and soft caps have an effect within a
row. Needs the `bench` extra (torch, transformers, PEFT), and nothing of this package.
Versions of these that were not checked are named.
"""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).parents[1]))  # if it is run as a file

import numpy as np
import peft
import torch
import transformers
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from scripts.peft_versions import report_versions

# Llama 4 with images reads it from the output of its text model, which lacks it.
MoeCausalLMOutputWithPast.image_outputs = None

FOLDER = Path(__file__).parents[1] / "tests/fixtures/families"
VOCABULARY = 23
LENGTHS = (13, 6, 9)
TARGET_LENGTHS = (5, 7, 3)
PROMPT_LENGTH = 3
NO_ADAPTER = (RuntimeError, ValueError, IndexError, AttributeError, TypeError)
"""Errors of PEFT for kinds of adapters that it lacks."""
NEW_TOKENS = 6

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM = {name: value for name, value in DECODER.items() if name != "head_dim"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
DEFAULT = {"rope_type": "default", "rope_theta": 100.0}
SPECIAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {
    **SPECIAL,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 32,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "d_ff": 12,
    "d_kv": 4,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    **SPECIAL,
    "d_model": 8,
    "encoder_layers": 3,
    "decoder_layers": 2,
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 12),
    "max_position_embeddings": 32,
    "forced_eos_token_id": None,
}
GEMMA3: dict[str, Any] = {
    **DECODER,
    "head_dim": 6,
    "tie_word_embeddings": True,
    "sliding_window": 4,
    "query_pre_attn_scalar": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": DEFAULT,
    },
}
# Heads of two sizes, and values that are keys where heads are wide.
GEMMA4: dict[str, Any] = {
    **DECODER,
    **{"hidden_size": 16, "num_hidden_layers": 4, "sliding_window": 4},
    "tie_word_embeddings": True,
    **{"head_dim": 8, "global_head_dim": 12},
    **{"num_key_value_heads": 4, "num_global_key_value_heads": 2},
    **{"attention_k_eq_v": True, "final_logit_softcapping": 2.0},
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "proportional", "rope_theta": 1000.0},
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": DEFAULT,
    },
}
IMAGES: dict[str, Any] = {
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 4,
    "num_channels": 1,
    "vision_use_head": False,
}
DEEP_IMAGES: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_heads", "in_channels"), 1),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 2),
    **{"patch_size": 2, "num_position_embeddings": 4, "out_hidden_size": 8},
}
# Two key heads, which value heads share; a loop over two repetitions of layers.
DELTA: dict[str, Any] = {
    **DECODER,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
}
DELTA_EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
    "shared_expert_intermediate_size": 6,
}
# Two groups of keys, which heads share; a loop over two repetitions of layers.
STATES: dict[str, Any] = {
    **NO_HEAD_DIM,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **{"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 3},
    "mamba_d_head": 8,
    **{"mamba_d_conv": 3, "mamba_chunk_size": 4},
}
SCAN: dict[str, Any] = SPECIAL | {
    **{"hidden_size": 12, "num_hidden_layers": 3, "state_size": 3, "conv_kernel": 3},
}
# Each layer has one part.
PARTS: dict[str, Any] = {
    **DECODER,
    "hidden_size": 16,
    **{"mamba_num_heads": 4, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 3},
    **{"conv_kernel": 3, "chunk_size": 4},
    "time_step_min": 0.8,  # some steps are smaller
}
# Two of three groups, each of two experts, after a layer without.
LATENT: dict[str, Any] = {
    **NO_HEAD_DIM,
    "hidden_size": 16,
    "num_key_value_heads": 4,
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 4},
    "kv_lora_rank": 8,
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
    **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
    **{"moe_intermediate_size": 4, "first_k_dense_replace": 1},
}
# Chunks of four positions, and queries that are scaled in the other layers.
CHUNKS: dict[str, Any] = {
    **DECODER,
    **{"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    **{"attention_chunk_size": 4, "floor_scale": 3, "attn_scale": 0.5},
    **{"num_local_experts": 4, "num_experts_per_tok": 2},
    **{"interleave_moe_layer_step": 2, "intermediate_size_mlp": 10},
    "rope_parameters": LLAMA3,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.8,
}
CONVOLUTIONS: dict[str, Any] = {
    **NO_HEAD_DIM,
    "hidden_size": 16,
    "num_hidden_layers": 7,
    "tie_word_embeddings": True,
    "layer_types": [*["conv", "conv", "full_attention"] * 2, "conv"],
    "rope_parameters": DEFAULT,
}
T5GEMMA: dict[str, Any] = {
    **DECODER,
    "head_dim": 6,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "sliding_window": 3,
    "query_pre_attn_scalar": 3,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "rope_parameters": DEFAULT,
}
ENCODER: dict[str, Any] = {
    **SPECIAL,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
DEBERTA: dict[str, Any] = ENCODER | {
    **{"relative_attention": True, "share_att_key": True, "type_vocab_size": 0},
    **{"position_biased_input": False, "pos_att_type": "p2c|c2p"},
    **{"norm_rel_ebd": "layer_norm", "position_buckets": 4},
    "max_position_embeddings": 10,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DECODER | {"rope_parameters": LLAMA3, "eos_token_id": [2, 19]},
    "llama_attention_bias": DECODER
    | {"model_type": "llama", "attention_bias": True, "rope_parameters": YARN},
    "mistral": DECODER | {"sliding_window": 4, "num_hidden_layers": 2},
    "ministral": DECODER
    | {
        "sliding_window": 4,
        "layer_types": ["full_attention", *["sliding_attention"] * 2],
    },
    "ministral3": DECODER
    | {
        "num_hidden_layers": 2,
        # Queries of later positions are scaled: 4 of them in the longest row.
        "rope_parameters": YARN
        | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
    },
    "mistral3": {
        "text_config": DECODER
        | {
            "model_type": "ministral3",
            "num_hidden_layers": 2,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
        },
        "vision_config": IMAGES | {"head_dim": 4, "hidden_size": 4},
        "tie_word_embeddings": False,
    },
    "qwen2": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": DECODER | {"head_dim": 6, "tie_word_embeddings": True},
    "qwen3_vl": {
        "text_config": DECODER
        | {
            "num_hidden_layers": 2,
            "rope_parameters": DEFAULT | {"mrope_section": [1, 1, 0]},
        },
        "vision_config": DEEP_IMAGES | {"deepstack_visual_indexes": [0]},
        **{name: SPECIAL[name] for name in ("bos_token_id", "eos_token_id")},
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "text_config": DECODER
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
            "rope_parameters": DEFAULT | {"mrope_section": [1, 1, 0]},
        },
        "vision_config": DEEP_IMAGES | {"deepstack_visual_indexes": [0]},
        **{name: SPECIAL[name] for name in ("bos_token_id", "eos_token_id")},
    },
    "gemma": DECODER | {"head_dim": 6, "tie_word_embeddings": True},
    "gemma2": DECODER
    | {
        "head_dim": 6,
        "tie_word_embeddings": True,
        "sliding_window": 4,
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma4_text": GEMMA4,
    "gemma4_experts": GEMMA4
    | {
        **{"model_type": "gemma4_text", "enable_moe_block": True},
        **{"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12},
    },
    "gemma4": {
        # The last layers share keys and values of the first.
        "text_config": GEMMA4
        | {"attention_k_eq_v": False, "num_key_value_heads": 2}
        | {"num_global_key_value_heads": None}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY},
        "vision_config": {
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
            **dict.fromkeys(("hidden_size", "intermediate_size", "patch_size"), 2),
            **{"num_key_value_heads": 1, "head_dim": 4},
            **{"pooling_kernel_size": 1, "position_embedding_size": 4},
        },
        **{"bos_token_id": 1, "eos_token_id": [2, 19], "pad_token_id": 0},
    },
    "gemma3_text": GEMMA3,
    "gemma3": {
        "text_config": GEMMA3
        | {"num_hidden_layers": 2, "layer_types": GEMMA3["layer_types"][:2]},
        "vision_config": IMAGES,
        "mm_tokens_per_image": 1,
        "bos_token_id": 1,
        "eos_token_id": [2, 19],
        "pad_token_id": 0,
    },
    "phi3": NO_HEAD_DIM
    | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "sliding_window": 4,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "phi3_longrope": NO_HEAD_DIM
    | {
        "model_type": "phi3",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.5, 3.0],
            "long_factor": [4.0, 9.0],
            "original_max_position_embeddings": 32,
        },
    },
    "smollm3": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "no_rope_layers": [1, 0, 1],
        "attention_bias": True,
    },
    "olmo": NO_HEAD_DIM | {"num_hidden_layers": 2, "hidden_size": 16},
    "olmo2": NO_HEAD_DIM | {"hidden_size": 16},
    "olmo3": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT},
    },
    # Layers with norms before their parts, and layers with norms after. transformers
    # writes the convolution in three equal parts.
    "olmo_hybrid": {name: x for name, x in DELTA.items() if name != "head_dim"}
    | {
        **{"linear_key_head_dim": 6, "linear_value_head_dim": 3},
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "granite": NO_HEAD_DIM | MULTIPLIERS | {"hidden_size": 16, "mlp_bias": True},
    "stablelm": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "use_qkv_bias": True,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "stablelm_parallel": NO_HEAD_DIM
    | {"model_type": "stablelm", "num_hidden_layers": 2, "use_parallel_residual": True}
    | {"hidden_size": 32},
    "starcoder2": NO_HEAD_DIM
    | {
        "num_hidden_layers": 2,
        "sliding_window": 4,
        "tie_word_embeddings": True,
        "rope_parameters": DEFAULT,
    },
    "phi": NO_HEAD_DIM
    | {"hidden_size": 16, "num_hidden_layers": 2, "qk_layernorm": True},
    "glm4": DECODER
    | {
        "head_dim": 8,
        "num_hidden_layers": 2,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "glm": DECODER
    | {
        "head_dim": 8,
        "num_hidden_layers": 2,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "seed_oss": DECODER | {"num_hidden_layers": 2, "rope_parameters": DEFAULT},
    "ernie4_5": DECODER
    | {
        "num_hidden_layers": 2,
        "use_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": DEFAULT,
    },
    "exaone4": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": DEFAULT,
    },
    "hunyuan_v1_dense": DECODER
    | {
        "num_hidden_layers": 2,
        "rope_parameters": DEFAULT
        | {"rope_type": "dynamic", "alpha": 5.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": DECODER
    | {
        **{"num_hidden_layers": 2, "attention_bias": True},
        **{"num_experts": 4, "moe_topk": [2, 2]},
        "rope_parameters": DEFAULT,
    },
    "arcee": DECODER | {"num_hidden_layers": 2, "rope_parameters": YARN},
    "helium": NO_HEAD_DIM
    | {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "head_dim": 4,
        "attention_bias": True,
        "rope_parameters": DEFAULT,
    },
    "lfm2": CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTIONS
    | {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
        **{"num_dense_layers": 2, "routed_scaling_factor": 1.5},
    },
    "qwen3_next": DELTA
    | DELTA_EXPERTS
    | {
        "num_hidden_layers": 3,
        "layer_types": DELTA["layer_types"][:3],
        "mlp_only_layers": [0],
    },
    "qwen3_5_text": DELTA,
    "qwen3_5": {
        "text_config": DELTA
        | {
            "num_hidden_layers": 2,
            "layer_types": DELTA["layer_types"][:2],
            "rope_parameters": DELTA["rope_parameters"] | {"mrope_section": [1, 1, 0]},
        },
        "vision_config": DEEP_IMAGES | {"out_hidden_size": 16},
        **{name: SPECIAL[name] for name in ("bos_token_id", "eos_token_id")},
        "tie_word_embeddings": True,
    },
    # Rounding errors would become too large in more layers.
    "qwen3_5_moe_text": DELTA
    | DELTA_EXPERTS
    | {"num_hidden_layers": 3, "layer_types": DELTA["layer_types"][:3]},
    "qwen3_5_moe": {
        "text_config": DELTA
        | DELTA_EXPERTS
        | {"num_hidden_layers": 2, "layer_types": DELTA["layer_types"][:2]},
        "vision_config": DEEP_IMAGES | {"out_hidden_size": 16},
        **{name: SPECIAL[name] for name in ("bos_token_id", "eos_token_id")},
    },
    "cohere": NO_HEAD_DIM
    | {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "use_qk_norm": True,
        "tie_word_embeddings": True,
        "logit_scale": 0.5,
        "rope_parameters": DEFAULT,
    },
    "cohere2": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "logit_scale": 0.5,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": DEFAULT,
    },
    "gpt_neox": NO_HEAD_DIM
    | {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "gpt_neox_sequential": NO_HEAD_DIM
    | {
        "model_type": "gpt_neox",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "mixtral": NO_HEAD_DIM
    | {"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": 4},
    # Scores of some experts are near the best, so that they share the weights.
    "phimoe": NO_HEAD_DIM
    | {
        **{"num_hidden_layers": 2, "num_local_experts": 4, "sliding_window": 4},
        **{"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3},
        "hidden_size": 16,
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 100.0},
            **{"short_factor": [1.5, 3.0], "long_factor": [4.0, 9.0]},
            **{"short_mscale": 1.2, "long_mscale": 1.3},
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2_moe": NO_HEAD_DIM
    | {
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
    },
    # Experts in one of four layers.
    "qwen2_moe_dense": NO_HEAD_DIM
    | {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "shared_expert_intermediate_size": 10,
    },
    "qwen3_moe": DECODER
    | {
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    "olmoe": NO_HEAD_DIM
    | {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": NO_HEAD_DIM
    | {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": NO_HEAD_DIM
    | MULTIPLIERS
    | {"num_hidden_layers": 2, "num_local_experts": 3},
    "granitemoehybrid": STATES
    | MULTIPLIERS
    | {"num_local_experts": 4, "shared_intermediate_size": 10},
    "granitemoehybrid_dense": STATES
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": [*["linear_attention"] * 2, "full_attention"],
        **{"num_local_experts": 0, "shared_intermediate_size": 10},
        "position_embedding_type": "rope",
        "rope_parameters": DEFAULT,
    },
    "glm4_moe": DECODER
    | {
        "head_dim": 8,
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
        # Two of three groups, each of two experts.
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
        **{"moe_intermediate_size": 4, "first_k_dense_replace": 1},
        **{"use_qk_norm": True, "attention_bias": True},
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "deepseek_v3": LATENT
    | {
        "q_lora_rank": 6,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek_v3_plain": LATENT
    | {
        **{"model_type": "deepseek_v3", "q_lora_rank": None},
        **{"attention_bias": True, "rope_interleave": False},
        "rope_parameters": DEFAULT,
    },
    "llama4_text": CHUNKS,
    "llama4": {
        "text_config": CHUNKS
        | {
            "num_hidden_layers": 3,
            **{"no_rope_layers": [1, 0, 1], "use_qk_norm": False},
            "moe_layers": [0, 2],
        },
        "vision_config": IMAGES
        | {
            **{"num_attention_heads": 1, "hidden_size": 4, "intermediate_size": 4},
            **{"vision_output_dim": 4, "projector_input_dim": 4},
            **{"projector_output_dim": 4, "image_size": 4, "patch_size": 2},
        },
    },
    "bamba": {name: x for name, x in STATES.items() if name != "layer_types"}
    | {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
    },
    "falcon_h1": {name: x for name, x in STATES.items() if name != "layer_types"}
    | {
        **{"num_hidden_layers": 2, "mamba_d_ssm": 24, "mamba_d_head": 6},
        **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
        **{"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7},
        **{"key_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8},
        **{"ssm_multipliers": [0.7, 1.3, 1.2, 0.9, 1.4], "mlp_multipliers": [1.5, 0.6]},
        "rope_parameters": DEFAULT,
    },
    "falcon_h1_norm": {name: x for name, x in STATES.items() if name != "layer_types"}
    | {
        **{"model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_d_ssm": None},
        **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        "rope_parameters": DEFAULT,
    },
    "mamba2": SPECIAL
    | {
        **{"hidden_size": 12, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 6},
        **{"n_groups": 2, "state_size": 3, "conv_kernel": 3, "chunk_size": 4},
    },
    "jamba": NO_HEAD_DIM
    | {
        **{"hidden_size": 16, "num_hidden_layers": 4},
        **{"attn_layer_period": 3, "attn_layer_offset": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"mamba_d_state": 3, "mamba_d_conv": 3, "mamba_dt_rank": 2},
    },
    "jamba_dense": NO_HEAD_DIM
    | {
        **{"model_type": "jamba", "num_experts": 1, "num_hidden_layers": 2},
        **{"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 3},
    },
    "minimax": DECODER
    | {
        **{"num_hidden_layers": 4, "num_local_experts": 4, "block_size": 4},
        **{"full_attn_alpha_factor": 3.0, "full_attn_beta_factor": 0.7},
        **{"linear_attn_alpha_factor": 3.0, "linear_attn_beta_factor": 0.7},
        **{"mlp_alpha_factor": 3.0, "mlp_beta_factor": 0.7},
        "rope_parameters": DEFAULT,
    },
    "mamba": SCAN | {"tie_word_embeddings": False},
    "falcon_mamba": SCAN | {"time_step_rank": 3, "mixer_rms_eps": 0.1},
    "nemotron_h": PARTS
    | {
        "layers_block_type": [
            *["linear_attention", "moe"] * 2,
            *("full_attention", "mlp"),
        ],
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
        **{"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5},
        "moe_shared_expert_intermediate_size": 10,
    },
    "nemotron_h_dense": PARTS
    | {
        "model_type": "nemotron_h",
        "layers_block_type": [*["linear_attention"] * 2, "full_attention", "mlp"],
    },
    "gpt_oss": DECODER
    | {
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        # Gates and projections reach it.
        "swiglu_limit": 0.6,
        "rope_parameters": YARN | {"truncate": False},
    },
    "gptj": {
        **GPT2,
        "n_embd": 16,
        "rotary_dim": 4,
    },
    "gpt_neo": {
        **SPECIAL,
        "hidden_size": 8,
        "num_heads": 2,
        "num_layers": 3,
        "attention_types": [[["local", "global"], 1], [["local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 32,
    },
    "falcon": {
        **SPECIAL,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "ffn_hidden_size": 12,
        "max_position_embeddings": 64,
        "rope_parameters": DEFAULT,
    },
    "falcon_sequential": {
        **SPECIAL,
        "model_type": "falcon",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "ffn_hidden_size": 12,
    },
    "falcon_new": {
        **SPECIAL,
        "model_type": "falcon",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "num_hidden_layers": 2,
        "new_decoder_architecture": True,
        "ffn_hidden_size": 12,
    },
    "bloom": {
        **SPECIAL,
        "hidden_size": 12,
        "n_head": 6,
        "n_layer": 2,
    },
    "gpt2": GPT2,
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "ffn_dim": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "t5": ENCODER_DECODER | {"feed_forward_proj": "relu"},
    "mt5": ENCODER_DECODER | {"tie_word_embeddings": False},
    "umt5": ENCODER_DECODER | {"num_layers": 3},
    "t5gemma": {
        # Windows in both directions, of which the last row leaves some tokens.
        "encoder": T5GEMMA | {"num_hidden_layers": 3},
        "decoder": T5GEMMA,
        **{name: T5GEMMA[name] for name in SPECIAL},
    },
    "bart": BART | {"decoder_start_token_id": 2, "scale_embedding": True},
    "marian": BART | {"decoder_start_token_id": 0},
    "pegasus": BART
    | {"decoder_start_token_id": 0, "activation_function": "relu"}
    | {"scale_embedding": True},
    "mbart": BART | {"decoder_start_token_id": 2},
    "m2m_100": BART | {"decoder_start_token_id": 2, "pad_token_id": 1},
    "bert": ENCODER,
    "roberta": ENCODER | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "xlm-roberta": ENCODER | {"hidden_act": "relu"},
    # Rows longer than the distances with a bucket of their own, and than the last.
    "deberta-v2": DEBERTA,
    "deberta-v2-new-head": DEBERTA | {"model_type": "deberta-v2", "legacy": False},
    "distilbert": {
        **SPECIAL,
        **{"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2},
        "max_position_embeddings": 32,
    },
    "electra": ENCODER | {"embedding_size": 8},
    "modernbert": ENCODER
    | {
        # A window of two tokens on each side in the middle layers.
        **{"num_hidden_layers": 4, "local_attention": 4},
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "rope_parameters": {
            "full_attention": DEFAULT,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    },
}
# Projections of other mixers than attention, of LFM2's and of latent attention.
MIXERS = (
    *("conv.in_proj", "conv.out_proj", "self_attn.out_proj"),
    *(
        f"{name}.{part}_proj"
        for name in ("mamba", "mixer")
        for part in ("in", "x", "out")
    ),
    *("mixer.up_proj", "mixer.down_proj"),
    *(f"linear_attn.{part}_proj" for part in ("g", "b", "a")),
    *(f"in_proj_{part}" for part in ("qkvz", "ba", "qkv", "z", "b", "a")),
    *("linear_attn.out_proj", "self_attn.qkv_proj", "self_attn.output_gate"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
# Modules that IA3 scales at their input, and at their output.
SCALED_INPUT = (
    *("down_proj", "dense_4h_to_h", "fc2", "mlp.c_proj", "fc_out", "wo"),
    *("feed_forward.w2", "shared_mlp.output_linear", "ffn.lin2", "mlp.Wo"),
    *("layer.0.output.dense", "layer.1.output.dense"),  # not those of attention
)
SCALED_OUTPUT = (
    *("kv_b_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"),
    *("SelfAttention.k", "SelfAttention.v", "EncDecAttention.v", "up_proj"),
    *("conv.in_proj", "in_proj_qkvz", "mamba.in_proj", "mixer.in_proj"),
    *("self.key", "self.value", "key_proj", "value_proj", "k_lin", "v_lin", "Wqkv"),
)


def main() -> None:
    """Makes the folders of the families on the command line."""
    parser = argparse.ArgumentParser(
        description="Make tiny random models, PEFT adapters and their logits.",
        epilog=f"families: {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "families", nargs="+", metavar="FAMILY", help="a family listed below, or all"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all weights and tokens (0)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=FOLDER,
        help="folder to write to; tests read another one named by FAMILY_FIXTURES",
    )
    arguments = parser.parse_args()
    names = list(FAMILIES) if "all" in arguments.families else arguments.families
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(
            f"unknown family {unknown[0]!r}; choose from {', '.join(FAMILIES)}"
        )
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names:
        folder = arguments.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        kinds = make_family(folder, name, arguments.seed)
        print(f"{folder}: {', '.join(kinds)}")


def make_family(folder: Path, name: str, seed: int) -> list[str]:
    """Writes the folder of one family and returns the kinds of its adapters."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    settings = {"model_type": name} | FAMILIES[name]
    config = transformers.AutoConfig.for_model(**settings)
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder / "base")
    targets = TARGET_LENGTHS if config.is_encoder_decoder else ()
    if name == "m2m_100":  # padding changes its positions
        targets = (max(TARGET_LENGTHS),) * len(TARGET_LENGTHS)
    given = rows(random, VOCABULARY, LENGTHS, targets)
    if name == "mbart":  # its targets begin with their last token, the end
        for row, length in zip(given["labels"], targets, strict=True):
            row[length - 1] = config.eos_token_id
    results = {key: value.numpy() for key, value in given.items()}
    results |= outputs("base", model, given)
    kinds = []
    for kind, settings in adapters(model):
        base = auto_class(config).from_pretrained(
            folder / "base", attn_implementation="eager"
        )
        try:
            adapted = peft.get_peft_model(base, settings).eval()
            randomize_adapter(adapted)
            results |= outputs(kind, adapted, given)
        except NO_ADAPTER as error:
            print(f"{name}: PEFT has no {kind}: {error}")
            continue
        adapted.peft_config["default"].base_model_name_or_path = "base"
        adapted.save_pretrained(folder / kind)
        (folder / kind / "README.md").unlink()
        kinds.append(kind)
    np.savez_compressed(folder / "ref.npz", **results)
    return kinds


def auto_class(config: Any) -> Any:
    """Returns the class of transformers for a model with its head."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    images = hasattr(config, "vision_config")
    if is_encoder(config):
        return transformers.AutoModelForMaskedLM
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not images:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def is_encoder(config: Any) -> bool:
    """Returns whether a model is an encoder alone, which generates no text."""
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    return masked and not config.is_encoder_decoder


def randomize(model: torch.nn.Module) -> None:
    """Sets all weights so that each of them has an effect on the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue  # sinusoidal positions
            deviation = 0.3
            if parameter.ndim == 2:
                deviation = parameter.shape[1] ** -0.5
            offset = parameter.mean().round() if "norm" in name or "ln_" in name else 0
            parameter.copy_(offset + deviation * torch.randn_like(parameter))
        if (bias := getattr(model, "final_logits_bias", None)) is not None:
            bias.copy_(torch.randn_like(bias))  # BART's, which is no parameter
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))


def randomize_adapter(model: torch.nn.Module) -> None:
    """Sets the weights of an adapter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif "ia3_" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "prompt" in name:
                parameter.copy_(0.7 * torch.randn_like(parameter))


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields each kind of adapter with its PEFT config."""
    seq2seq = model.config.is_encoder_decoder
    task = {"task_type": "SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM"}
    if is_encoder(model.config):
        task = {"task_type": "FEATURE_EXTRACTION"}
    virtual = {"num_virtual_tokens": PROMPT_LENGTH}
    tokens, cache = sizes_of_part(model.config)
    # In Pegasus and Falcon-H1, the tokens behind a prompt are not scaled.
    scaled = model.config.model_type == "pegasus" and model.config.scale_embedding
    factor = getattr(model.config, "embedding_multiplier", 1)
    if not (scaled or (model.config.model_type == "falcon_h1" and factor != 1)):
        yield "prompt_tuning", peft.PromptTuningConfig(**task, **virtual, **tokens)
    # Falcon's cache has the keys of a group for each of its query heads, between which
    # a random prefix differs; no model of groups can express that. In Gemma 4 with
    # unlike numbers of heads PEFT skips the layers with more of them. Mamba and
    # Mamba-2 have no keys, and ignore those of a prefix.
    skipping = ("new_decoder_architecture", "attention_k_eq_v")
    if "mamba" not in model.config.model_type and not any(
        getattr(model.config, name, False) for name in skipping
    ):
        yield "prefix_tuning", peft.PrefixTuningConfig(**task, **virtual, **cache)
    names = [name for name, _ in model.named_modules()]
    text = [name for name in names if ".language_model." in f".{name}"]
    # PEFT counts experts among the linear layers; adapters of them are not read. Nor
    # does transformers apply one of Mamba's steps.
    apart = any(name.endswith((".experts", ".dt_proj")) for name in names)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj", *MIXERS]
    # PEFT refuses the output projection of Mamba in most models that have it.
    refusing = model.config.model_type in (
        *("bamba", "falcon_h1", "nemotron_h", "mamba2", "mamba", "falcon_mamba"),
    )
    linear: Any = (
        [
            end
            for end in attention
            if any(name.endswith(f".{end}") for name in names)
            and not (refusing and end.endswith(".out_proj"))
        ]
        if apart or refusing
        else "all-linear"
    )
    # Parts that read images are not adapted, although they have the same names.
    linear = [
        name
        for name in text
        if "_proj" in name.split(".")[-1] and "per_layer_" not in name
    ] or linear
    if is_encoder(model.config):
        layers = model.base_model.named_modules()  # not those before the head
        linear = [name for name, x in layers if isinstance(x, torch.nn.Linear)]
    yield "lora", peft.LoraConfig(**task, r=2, target_modules=linear)
    present = [
        [name for name in text if name.endswith(ends)]
        or [end for end in ends if any(name.endswith(f".{end}") for name in names)]
        for ends in (SCALED_OUTPUT, SCALED_INPUT)
    ]
    yield (
        "ia3",
        peft.IA3Config(
            **task,
            target_modules=sorted([*present[0], *present[1]]),
            feedforward_modules=sorted(present[1]),
        ),
    )


def sizes_of_part(config: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Returns sizes for prompts and for prefixes that PEFT does not find itself."""
    if config.model_type == "distilbert":
        both = {"num_layers": config.n_layers, "num_attention_heads": config.n_heads}
        both |= {"token_dim": config.dim}
        return both, both
    if config.model_type in ("mamba", "falcon_mamba"):
        both = {"num_layers": config.num_hidden_layers, "num_attention_heads": 1}
        return both | {"token_dim": config.hidden_size}, both
    decoder = getattr(config, "decoder", None)  # T5Gemma's
    if decoder is None:
        return {}, {}
    heads = decoder.num_key_value_heads
    both = {"num_layers": decoder.num_hidden_layers, "num_attention_heads": heads}
    tokens, cache = decoder.hidden_size, heads * decoder.head_dim
    return both | {"token_dim": tokens}, both | {"token_dim": cache}


def rows(
    random: np.random.Generator,
    vocabulary: int,
    lengths: Sequence[int],
    target_lengths: Sequence[int] = (),
) -> dict[str, torch.Tensor]:
    """Returns rows of unlike length, padded on the right.

    Args:
      random: source of the ids.
      vocabulary: number after the largest id.
      lengths: number of tokens of each row.
      target_lengths: number of targets of each row of an encoder-decoder.
    """

    def padded(lengths, padding):
        ids = np.full((len(lengths), max(lengths)), padding)
        for row, length in enumerate(lengths):
            ids[row, :length] = random.integers(3, vocabulary, length)
        return torch.tensor(ids)

    tokens = padded(lengths, 0)
    given = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    return given | ({"labels": padded(target_lengths, -100)} if target_lengths else {})


def outputs(kind: str, model: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns the logits of all rows, and the tokens appended to each row alone."""
    with torch.no_grad():
        logits = model(**given).logits
        if "labels" in given:
            logits = logits[:, -given["labels"].shape[1] :]
        else:
            logits = logits[:, -given["input_ids"].shape[1] :]
            logits = logits * given["attention_mask"][..., None]
        if is_encoder(model.config):
            return {f"{kind}.logits": logits.numpy().astype(np.float32)}
        appended = [
            continued(model, row[: int(mask.sum())])
            for row, mask in zip(
                given["input_ids"], given["attention_mask"], strict=True
            )
        ]
    greedy = np.zeros((len(appended), NEW_TOKENS), np.int32)
    for row, tokens in zip(greedy, appended, strict=True):
        row[: len(tokens)] = tokens
    return {
        f"{kind}.logits": logits.numpy().astype(np.float32),
        f"{kind}.greedy_single": greedy,
    }


def continued(
    model: Any, row: torch.Tensor, count: int = NEW_TOKENS, **more: torch.Tensor
) -> list[int]:
    """Returns the tokens that greedy decoding appends to one row.

    Each step computes the whole row, since PEFT's `generate` depends on the version of
    transformers.

    Args:
      model: model of transformers, or PEFT's around one.
      row: tokens, of the encoder if there is one.
      count: number of tokens, unless an end token comes first.
      more: further arguments of the model.
    """
    seq2seq = model.config.is_encoder_decoder
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    made: list[int] = []
    while len(made) < count and not (made and made[-1] in ends):
        given = row.tolist() + ([] if seq2seq else made)
        ids = torch.tensor([given])
        inputs = more | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if seq2seq:
            start = model.generation_config.decoder_start_token_id
            if start is None:
                start = model.generation_config.bos_token_id
            inputs["decoder_input_ids"] = torch.tensor([[start, *made]])
            # Without it, T5Gemma takes a made token that has padding's id for padding.
            inputs["decoder_attention_mask"] = torch.ones(1, len(made) + 1).long()
        made.append(int(model(**inputs, use_cache=False).logits[0, -1].argmax()))
    return made


if __name__ == "__main__":
    main()
