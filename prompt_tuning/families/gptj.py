"""GPT-J: attention and feed-forward layer in parallel, interleaved rotary positions."""

import functools

from prompt_tuning.families import gpt2, llama_layout, rotary_settings
from prompt_tuning.families.family import Family
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

PROJECTIONS = {
    "self_attention/query": "attn.q_proj",
    "self_attention/key": "attn.k_proj",
    "self_attention/value": "attn.v_proj",
    "self_attention/out": "attn.out_proj",
    "mlp/up": "mlp.fc_in",
    "mlp/down": "mlp.fc_out",
}
TIED_BIAS = "a bias of a tied head is not implemented"
NORMS = {"self_attention_norm": "ln_1"}


def _read_gptj(settings: HuggingFaceSettings) -> ModelFields:
    settings.require("tie_word_embeddings", False, TIED_BIAS)
    # Its positions are rotary, so that no tensor's shape tells their number.
    fields = gpt2.read_gpt2_layout(settings.with_defaults({"n_positions": 2048}))
    head_width = settings.head_width(fields["width"], fields["heads"])
    rotated = rotary_settings.read_rotary_dim(settings, head_width, 64)
    return fields | {
        "parallel": True,
        "shared_norm": True,
        "positions": "rotary",
        "rotary_width": rotated,
        "rotary_interleaved": True,
        "biases": "mlp",
        "tied_head": False,
        "head_bias": True,
    }


GPTJ = Family(
    model_type="gptj",
    title="GPT-J",
    read_fields=_read_gptj,
    recipes=functools.partial(
        llama_layout.layout_recipes, modules=PROJECTIONS, norms=NORMS, **gpt2.OUTSIDE
    ),
    embedding_tables=("transformer.wte.weight", "wte.weight"),
    base_prefix=gpt2.PREFIX,
    inert={"resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "use_cache"},
)
