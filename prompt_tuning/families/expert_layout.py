"""Names of tensors and settings of mixtures of experts."""

from prompt_tuning.checkpoints.special_layouts import FusedExperts, TurnedExperts
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    identity,
    layered,
    transpose,
)
from prompt_tuning.core.layer_kinds import layers_with
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.family import LayerNames, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import PREFIX, PROJECTIONS, layout_recipes

ATTENTION = {
    ours: name for ours, name in PROJECTIONS.items() if not ours.startswith("mlp")
}
PATH = "decoder/layers/mlp"
DENSE = {f"dense_{ours}": name for ours, name in PROJECTIONS.items() if "mlp" in ours}
LAYERS = "num_hidden_layers"
PARTS = ("gate_proj", "up_proj", "down_proj")
BALANCING = {"output_router_logits", "router_aux_loss_coef"}
"""Settings of losses that balance the load of experts, in training of the router."""


def read_experts(
    settings: HuggingFaceSettings,
    count: str = "num_experts",
    per_token: str = "num_experts_per_tok",
) -> ModelFields:
    """Reads the number of experts, and how many process a token."""
    total, chosen = settings.size(count), settings.size(per_token)
    if chosen > total:
        settings.refuse(per_token, f"at most {count}, {total}")
    return {"experts": total, "experts_per_token": chosen}


def read_dense_layers(settings: HuggingFaceSettings) -> ModelFields:
    """Reads which layers have no experts, from Qwen's settings.

    Raises:
      InputError: if no layer has experts.
    """
    layers = settings.layers(LAYERS)
    step = settings.integer("decoder_sparse_step", 1, minimum=1)
    listed = settings.sequence("mlp_only_layers", [])
    dense = tuple(i for i in range(layers) if i in listed or (i + 1) % step)
    if len(dense) == layers:
        name = "decoder_sparse_step" if step > layers else "mlp_only_layers"
        settings.refuse(name, f"one of the {layers} layers with experts at least")
    if not dense:
        return {}
    return {"dense_layers": dense, "dense_width": settings.size("intermediate_size")}


def feed_forward_modules(config: ModelConfig) -> dict[str, str]:
    """Returns Llama's modules for feed-forward layers without experts."""
    if config.experts:
        return DENSE if config.dense_layers else {}
    return {ours: name for ours, name in PROJECTIONS.items() if "mlp" in ours}


def prefix_of(names: StoredNames) -> str:
    """Returns the prefix of all names except the head's."""
    return "" if "embed_tokens.weight" in names else PREFIX


def expert_recipes(
    config: ModelConfig,
    names: StoredNames,
    *,
    block: str = "mlp",
    parts: tuple[str, str, str] = PARTS,
) -> Recipes:
    """Returns the recipes of all parameters, with separately stored experts.

    For `block` and `parts` see `separate_experts`.
    """
    modules = ATTENTION | feed_forward_modules(config)
    experts = separate_experts(config, prefix_of(names), block=block, parts=parts)
    return layout_recipes(config, names, modules=modules) | experts


def expert_tensors(config: ModelConfig, prefix: str, names: LayerNames) -> Recipes:
    """Returns the recipes of tensors in all layers with experts.

    `names` are behind `prefix` and the layer's, by the paths within the experts' block.
    """
    layers = layers_with(config, "mlp")
    return {
        f"{PATH}/{ours}": layered(f"{prefix}layers.{{}}.{name}", layers, part)
        for ours, (name, part) in names.items()
    }


def separate_experts(
    config: ModelConfig,
    prefix: str,
    *,
    block: str = "mlp",
    router: str = "gate",
    parts: tuple[str, ...] = PARTS,
) -> Recipes:
    """Returns the recipes of routers, and of experts that are stored separately.

    `block` is the module of the router and the experts within a layer, and `parts` the
    modules of an expert's projections; with two, there is no gate.
    """
    pattern = f"{prefix}layers.{{}}.{block}."
    layers, count = layers_with(config, "mlp"), config.experts
    router = f"{block}.{router}.weight"
    recipes = expert_tensors(config, prefix, {"router/kernel": (router, transpose)})
    for ours, part in zip(("gate", "up", "down")[-len(parts) :], parts, strict=True):
        sources = tuple(
            f"{pattern.format(layer)}experts.{expert}.{part}.weight"
            for layer in layers
            for expert in range(count)
        )
        recipes[f"{PATH}/expert_{ours}"] = Recipe(sources, True, transpose, count)
    return recipes


def routed_expert_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    """Returns the recipes of all parameters, with the experts of `routed_experts`.

    Layers without experts have a feed-forward layer with Llama's names.
    """
    modules = ATTENTION | feed_forward_modules(config)
    experts = routed_experts(config, prefix_of(names))
    return layout_recipes(config, names, modules=modules) | experts


def routed_experts(config: ModelConfig, prefix: str) -> Recipes:
    """Returns the recipes of experts chosen by sigmoids, and an ungated shared one.

    `prefix` is the prefix of layers' names.
    """
    tensors = {
        "router_correction": ("mlp.gate.e_score_correction_bias", identity),
        **{
            f"shared/{ours}/kernel": (
                f"mlp.shared_experts.{ours}_proj.weight",
                transpose,
            )
            for ours in ("gate", "up", "down")
        },
    }
    routing = expert_tensors(config, prefix, tensors)
    return separate_experts(config, prefix) | routing


def read_routed_experts(settings: HuggingFaceSettings) -> ModelFields:
    """Reads experts chosen by sigmoids, and the first layers, which have none."""
    width, layers = settings.size("moe_intermediate_size"), settings.layers(LAYERS)
    shared = settings.integer("n_shared_experts", 1, minimum=1)
    first = settings.integer("first_k_dense_replace", 1, minimum=0)
    if first >= layers:
        settings.refuse("first_k_dense_replace", f"less than {LAYERS}, {layers}")
    return read_routing(settings) | {
        "feed_forward_width": width,
        "shared_expert_width": width * shared,
        "shared_expert_gated": False,
        "dense_layers": tuple(range(first)),
        "dense_width": settings.size("intermediate_size") if first else 0,
    }


def read_routing(settings: HuggingFaceSettings) -> ModelFields:
    """Reads how sigmoids choose experts."""
    return read_experts(settings, "n_routed_experts") | {
        "routing": "sigmoid",
        "expert_groups": settings.integer("n_group", 1, minimum=1),
        "expert_groups_per_token": settings.integer("topk_group", 1, minimum=1),
        "expert_multiplier": settings.positive("routed_scaling_factor", 1.0),
        "normalize_experts": settings.flag("norm_topk_prob", True),
    }


def fused_expert_recipes(
    config: ModelConfig, names: StoredNames, router: str, inward: str, outward: str
) -> Recipes:
    """Returns the recipes of all parameters, with the experts of `fused_experts`."""
    experts = fused_experts(config, prefix_of(names), router, inward, outward)
    return layout_recipes(config, names, modules=ATTENTION) | experts


def fused_experts(
    config: ModelConfig, prefix: str, router: str, inward: str, outward: str
) -> Recipes:
    """Returns the recipes of routers, and of experts that are stored in two tensors.

    The tensor `inward` has the gates, followed by the other inward projections.
    """
    tensors = {
        "router/kernel": (router, transpose),
        "expert_gate": (inward, FusedExperts(0, 2)),
        "expert_up": (inward, FusedExperts(1, 2)),
        "expert_down": (outward, FusedExperts()),
    }
    return expert_tensors(config, prefix, tensors)


def turned_experts(
    config: ModelConfig, prefix: str, router: str, experts: str
) -> Recipes:
    """Returns the recipes of routers, and of experts that are stored `[E, in, out]`."""
    both, width = 2 * config.feed_forward_width, config.width
    tensors = {
        "router/kernel": (f"{router}.weight", transpose),
        "expert_gate": (f"{experts}.gate_up_proj", TurnedExperts(0, 2, both)),
        "expert_up": (f"{experts}.gate_up_proj", TurnedExperts(1, 2, both)),
        "expert_down": (f"{experts}.down_proj", TurnedExperts(0, 1, width)),
    }
    return expert_tensors(config, prefix, tensors)
