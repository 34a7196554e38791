"""Names of tensors and settings of mixtures of experts."""

from collections.abc import Collection
from typing import Any

from prompt_tuning.checkpoints.fused_experts import FusedExperts
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    layered,
    transpose,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings
from prompt_tuning.families.llama_layout import PREFIX, PROJECTIONS, layout_recipes

ATTENTION = {
    ours: name for ours, name in PROJECTIONS.items() if not ours.startswith("mlp")
}
PATH = "decoder/layers/mlp"
BALANCING = frozenset({"output_router_logits", "router_aux_loss_coef"})
"""Settings of losses that balance the load of experts, in training of the router."""


def read_experts(
    settings: HuggingFaceSettings, count: str = "num_experts"
) -> dict[str, Any]:
    """Reads the number of experts, all and of each token."""
    total = settings.size(count)
    per_token = settings.size("num_experts_per_tok")
    if per_token > total:
        settings.refuse("num_experts_per_tok", f"at most {count}, {total}")
    return {"experts": total, "experts_per_token": per_token}


def require_all_sparse(settings: HuggingFaceSettings) -> None:
    """Checks that every layer has experts.

    Raises:
      InputError: if some layers are dense.
    """
    reason = "dense layers among layers of experts are not implemented"
    settings.require("decoder_sparse_step", 1, reason)
    settings.require("mlp_only_layers", [], reason)


def expert_recipes(
    config: ModelConfig,
    names: Collection[str],
    *,
    block: str = "mlp",
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Recipe]:
    """Returns the recipes of all parameters; see `Family.recipes`.

    Args:
      config: config of the model.
      names: names of the stored tensors.
      block: module of the router and the experts.
      parts: modules of an expert's three projections, if experts are stored apart.
    """
    prefix = "" if "embed_tokens.weight" in names else PREFIX
    pattern = f"{prefix}layers.{{}}.{block}."
    layers, count = config.layers, config.experts
    router = layered(f"{pattern}gate.weight", layers, transpose)
    experts = {}
    for ours, part in zip(("gate", "up", "down"), parts, strict=True):
        sources = tuple(
            f"{pattern.format(layer)}experts.{expert}.{part}.weight"
            for layer in range(layers)
            for expert in range(count)
        )
        experts[f"{PATH}/expert_{ours}"] = Recipe(sources, True, transpose, count)
    attention = layout_recipes(config, names, modules=ATTENTION)
    return attention | {f"{PATH}/router/kernel": router} | experts


def fused_expert_recipes(
    config: ModelConfig, names: Collection[str], router: str, inward: str, outward: str
) -> dict[str, Recipe]:
    """Returns the recipes of experts that are stored in two tensors.

    Args:
      config: config of the model.
      names: names of the stored tensors.
      router: tensor of the router, within a layer.
      inward: tensor of the gates and then the other inward projections.
      outward: tensor of the outward projections.
    """
    prefix = "" if "embed_tokens.weight" in names else PREFIX
    tensors = {
        "router/kernel": (router, transpose),
        "expert_gate": (inward, FusedExperts(0, 2)),
        "expert_up": (inward, FusedExperts(1, 2)),
        "expert_down": (outward, FusedExperts()),
    }
    experts = {
        f"{PATH}/{ours}": layered(f"{prefix}layers.{{}}.{name}", config.layers, part)
        for ours, (name, part) in tensors.items()
    }
    return layout_recipes(config, names, modules=ATTENTION) | experts
