"""Phi-1, 1.5 and 2: attention and feed-forward layer in parallel after one norm."""

import functools

from prompt_tuning.families import llama_layout
from prompt_tuning.families.gptj import TIED_BIAS
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama import LLAMA

MODULES = llama_layout.PROJECTIONS | {
    "self_attention/out": "self_attn.dense",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}
QUERY_KEY_NORMS = {
    "self_attention/query_norm": "self_attn.q_layernorm",
    "self_attention/key_norm": "self_attn.k_layernorm",
}


def _read_phi(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("tie_word_embeddings", False, TIED_BIAS)
    norms = settings.flag("qk_layernorm", False)
    return {
        **llama_layout.read_rotated(settings, divided=True, partial=0.5),
        "norm": "layer",
        "norm_epsilon": settings.positive("layer_norm_eps", 1e-5),
        "query_key_norm": "head" if norms else "none",
        "parallel": True,
        "shared_norm": True,
        "activation": settings.activation(settings.text("hidden_act", "gelu_new")),
        "gated": False,
        "biases": "all",
        "head_bias": True,
    }


PHI = LLAMA.like(
    "phi",
    "Phi-1, 1.5 and 2",
    _read_phi,
    recipes=functools.partial(
        llama_layout.layout_recipes,
        modules=MODULES,
        query_key_norms=QUERY_KEY_NORMS,
        final_norm="final_layernorm",
    ),
    more_inert={"resid_pdrop", "embd_pdrop"},
)
