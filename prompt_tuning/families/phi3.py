"""Phi-3, 3.5 and 4: a Llama with fused projections."""

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import GATED, QKV, Recipes, StoredNames, fused_parts
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import has_window, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import layout_recipes, read_rotated
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def _read_phi3(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, epsilon=1e-5, partial=1.0)
    layers = fields["layers"]
    kind = SLIDING if has_window(settings) else FULL
    return fields | read_windows(settings, layers, [kind] * layers)


def _phi3_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    heads, groups = config.heads, config.key_value_heads
    shares = (heads, groups, groups)
    fused = fused_parts("self_attention", QKV, "self_attn.qkv_proj", shares)
    fused |= fused_parts("mlp", GATED, "mlp.gate_up_proj")
    return layout_recipes(config, names, fused=fused)


PHI3 = LLAMA.like(
    "phi3",
    "Phi-3, 3.5 and 4",
    _read_phi3,
    recipes=_phi3_recipes,
    more_inert={"resid_pdrop", "embd_pdrop"},
)
