"""Phi-3, 3.5 and 4: a Llama with fused projections."""

from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import FusedPart, Recipe
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.layer_settings import has_window, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import layout_recipes, read_layout
from prompt_tuning.families.rotary_settings import FULL, SLIDING, read_rotary

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"


def read_phi3(settings: HuggingFaceSettings) -> dict[str, Any]:
    """Returns fields of `ModelConfig`; see `Family.read_fields`."""
    fields = read_layout(settings)
    layers = fields["layers"]
    kind = SLIDING if has_window(settings) else FULL
    fields |= read_rotary(settings, fields["head_width"], partial=1.0)
    fields["norm_epsilon"] = settings.positive("rms_norm_eps", 1e-5)
    return fields | read_windows(settings, layers, [kind] * layers)


def phi3_recipes(config: ModelConfig, names: Collection[str]) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`."""
    heads, groups = config.heads, config.key_value_heads
    qkv = {
        f"self_attention/{name}": (
            QKV,
            FusedPart(i, (heads, groups, groups), in_first=False),
        )
        for i, name in enumerate(("query", "key", "value"))
    }
    gate_up = {
        f"mlp/{name}": (GATE_UP, FusedPart(i, (1, 1), in_first=False))
        for i, name in enumerate(("gate", "up"))
    }
    return layout_recipes(config, names, fused=qkv | gate_up)


PHI3 = LLAMA.like(
    "phi3",
    "Phi-3, 3.5 and 4",
    read_phi3,
    recipes=phi3_recipes,
    more_inert={"resid_pdrop", "embd_pdrop"},
)
