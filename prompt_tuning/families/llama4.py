"""Llama 4: attention in chunks, weighted inputs of experts, alternating layers.

For models that also read images, only the text model is read.
"""

import functools

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.rotary_scaling import QueryScaling
from prompt_tuning.families import expert_layout, text_part
from prompt_tuning.families.family import Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import read_unrotated, read_windows
from prompt_tuning.families.llama import LLAMA
from prompt_tuning.families.llama_layout import INERT, layout_recipes, read_rotated
from prompt_tuning.families.rotary_settings import FULL

CHUNKED = "chunked_attention"
STEM = "feed_forward."
PREFIX = "language_model."


def _read_llama4_text(settings: HuggingFaceSettings) -> ModelFields:
    fields = read_rotated(settings, epsilon=1e-5, head_width=128, base=500_000.0)
    unrotated = read_unrotated(settings, fields["layers"])
    normed = settings.flag("use_qk_norm", True)
    biased = settings.flag("attention_bias", False)
    return {
        **fields,
        **_read_chunks(settings, fields["layers"], unrotated),
        **_read_expert_layers(settings, fields["layers"]),
        "rotary_interleaved": True,
        "unrotated_layers": unrotated,
        "query_key_norm": "rotated" if normed else "none",
        "query_scaling": _read_query_scaling(settings),
        "biases": "attention" if biased else "none",
    }


def _read_chunks(
    settings: HuggingFaceSettings, layers: int, unrotated: tuple[int, ...]
) -> ModelFields:
    name, size = "attention_chunk_size", None
    if settings.values.get(name, 0) is not None:
        size = settings.integer(name, 8192, minimum=1)
    kinds = [CHUNKED if size and i not in unrotated else FULL for i in range(layers)]
    found = read_windows(settings, layers, kinds, window=size or 1, limited=CHUNKED)
    if found and size is None:
        settings.refuse(name, "a number, as some layer_types are chunked_attention")
    return found | {"chunked": True} if found else {}


def _read_query_scaling(settings: HuggingFaceSettings) -> QueryScaling | None:
    slope = settings.number("attn_scale", 0.1, minimum=0)
    positions = settings.integer("floor_scale", 8192, minimum=1)
    # Some published folders have 4 for true.
    if not settings.value("attn_temperature_tuning", True) or not slope:
        return None
    return QueryScaling(slope=slope, positions=positions, first=1, unrotated=True)


def _read_expert_layers(settings: HuggingFaceSettings, layers: int) -> ModelFields:
    """Reads which layers have experts, and the width of the rest."""
    step = settings.integer("interleave_moe_layer_step", 1, minimum=1)
    sparse = settings.sequence("moe_layers", [*range(step - 1, layers, step)])
    dense = tuple(i for i in range(layers) if i not in sparse)
    if len(dense) == layers:
        settings.refuse("moe_layers", "one of the layers with experts at least")
    width = settings.size("intermediate_size_mlp", 16384)
    return expert_layout.read_experts(settings, "num_local_experts") | {
        "routing": "sigmoid_inputs",
        "shared_expert_width": settings.size("intermediate_size"),
        "shared_expert_gated": False,
        "dense_layers": dense,
        "dense_width": width if dense else 0,
    }


def _llama4_text_recipes(
    config: ModelConfig, names: StoredNames, outer: str = ""
) -> Recipes:
    """Returns the recipes of all parameters; see `Family.recipes`.

    `outer` is a prefix of all names.
    """
    prefix = f"{outer}{expert_layout.prefix_of(names)}"
    blocks = {"mlp/shared": f"{STEM}shared_expert."}
    blocks |= {"dense_mlp": STEM} if config.dense_layers else {}
    modules = expert_layout.ATTENTION | {
        f"{path}/{name}": f"{stem}{name}_proj"
        for path, stem in blocks.items()
        for name in ("gate", "up", "down")
    }
    head = f"{outer}lm_head.weight"
    layout = layout_recipes(config, names, modules=modules, prefix=prefix, head=head)
    return layout | expert_layout.turned_experts(
        config, prefix, f"{STEM}router", f"{STEM}experts"
    )


LLAMA4_TEXT = LLAMA.like(
    "llama4_text",
    "Llama 4, text models",
    _read_llama4_text,
    recipes=_llama4_text_recipes,
    inert=INERT - {"pretraining_tp"}
    | expert_layout.BALANCING
    | {"router_jitter_noise"},
)
LLAMA4 = LLAMA4_TEXT.like(
    "llama4",
    "Llama 4 with images (text model only)",
    functools.partial(
        text_part.read_text_part, readers={"llama4_text": _read_llama4_text}, tied=False
    ),
    recipes=functools.partial(_llama4_text_recipes, outer=PREFIX),
    embedding_tables=(f"{PREFIX}model.embed_tokens.weight",),
    head_name=f"{PREFIX}lm_head.weight",
    base_prefix="",
    prefix_aliases=(PREFIX,),
    token_parts=(text_part.TEXT,),
    unread_parts=("vision_model", "multi_modal_projector"),
    unread_modules=tuple(
        f"vision_model.model.layers.{{}}.self_attn.{name}_proj"
        for name in ("q", "k", "v", "o")
    ),
    more_inert=text_part.IMAGE_SETTINGS,
)
