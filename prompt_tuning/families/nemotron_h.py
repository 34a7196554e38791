"""Nemotron-H and Nemotron 3: one part per layer, with Mamba-2 as most mixers."""

from prompt_tuning.checkpoints.stored_tensors import identity
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import expert_layout, memory_layout
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import PREFIX, layout_recipes, read_layout
from prompt_tuning.families.rotary_settings import FULL

PARTS = ("up_proj", "down_proj")
STORED = "backbone."
"""Prefix of tensors in files; transformers has another one."""
PREFIXES = (STORED, PREFIX, "")
TABLE = "embeddings.weight"
DENSE, EXPERTS = "mlp", "moe"
KINDS = "layers_block_type"
LETTERS = {"M": memory_layout.LINEAR, "*": FULL, "-": DENSE, "E": EXPERTS}
SIZES = {
    "heads": "mamba_num_heads",
    "groups": "n_groups",
    "states": "ssm_state_size",
    "taps": "conv_kernel",
}
DEFAULTS = {"heads": 128, "groups": 8, "states": 128, "taps": 4}
REQUIRED = {
    "mlp_bias": (False, "biases are not implemented"),
    "use_bias": (False, "biases are not implemented"),
    "use_conv_bias": (True, "other convolutions are not implemented"),
    "mamba_hidden_act": ("silu", "the convolution has SiLU"),
    "moe_latent_size": (None, "experts of another width are not implemented"),
}
"""The only values of settings, with the reason."""
ATTENTION = {
    f"self_attention/{ours}": f"mixer.{name}_proj"
    for ours, name in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
}


def _read_nemotron_h(settings: HuggingFaceSettings) -> ModelFields:
    kinds = _read_kinds(settings)
    numbers = {
        kind: tuple(i for i, layer_kind in enumerate(kinds) if layer_kind == kind)
        for kind in LETTERS.values()
    }
    for name, (value, reason) in REQUIRED.items():
        settings.require(name, value, reason)
    fields = read_layout(
        settings, activation="mlp_hidden_act", head_width=128, layers=len(kinds)
    )
    activation = settings.activation(settings.text("mlp_hidden_act", "relu2"))
    width = settings.size("mamba_head_dim", 64)
    old = "mamba_dt_min" in settings
    step = settings.number("mamba_dt_min" if old else "time_step_min", 0.001, minimum=0)
    return {
        **fields,
        **{"positions": "none", "gated": False, "activation": activation},
        "norm_epsilon": settings.positive("layer_norm_epsilon", 1e-5),
        "feed_forward_layers": tuple(sorted(numbers[DENSE] + numbers[EXPERTS])),
        "minimum_step": step,
        **memory_layout.read_mamba2(
            settings, numbers[memory_layout.LINEAR], width, sizes=DEFAULTS, names=SIZES
        ),
        **_read_experts(settings, numbers[EXPERTS], numbers[DENSE]),
    }


def _read_kinds(settings: HuggingFaceSettings) -> list[str]:
    name = next((x for x in (KINDS, "layer_types") if x in settings), None)
    if name is None:
        name = "hybrid_override_pattern"
        pattern = settings.text(name, "ME*-")
        kinds = [LETTERS.get(str(x), str(x)) for x in pattern]
    else:
        kinds = [
            memory_layout.OLD_KINDS.get(str(x), str(x)) for x in settings.sequence(name)
        ]
    some = {DENSE, EXPERTS} & {*kinds}
    if not some or not set(kinds) <= set(LETTERS.values()):
        expected = f"{', '.join(LETTERS.values())} for each layer, of the last two one"
        settings.refuse(name, expected)
    return kinds


def _read_experts(
    settings: HuggingFaceSettings, sparse: tuple[int, ...], dense: tuple[int, ...]
) -> ModelFields:
    """Reads the experts of the layers that have any, and the width of the rest."""
    if not sparse:
        return {"feed_forward_width": settings.size("intermediate_size")}
    return expert_layout.read_routing(settings) | {
        "feed_forward_width": settings.size("moe_intermediate_size"),
        "shared_expert_width": settings.size("moe_shared_expert_intermediate_size"),
        "shared_expert_gated": False,
        "dense_layers": dense,
        "dense_width": settings.size("intermediate_size") if dense else 0,
    }


def _nemotron_h_recipes(config: ModelConfig, names: StoredNames) -> Recipes:
    prefix = next((x for x in PREFIXES if f"{x}{TABLE}" in names), PREFIX)
    dense = "dense_mlp" if config.experts else "mlp"
    stems = {"mlp/shared": "shared_experts."} if config.experts else {}
    stems |= {dense: ""} if config.dense_layers or not config.experts else {}
    modules = ATTENTION | {
        f"{path}/{name}": f"mixer.{stem}{name}_proj"
        for path, stem in stems.items()
        for name in ("up", "down")
    }
    if config.recurrent_layers:
        modules |= {"mamba2/output": "mixer.out_proj"}
    recipes = layout_recipes(
        config,
        names,
        fused=memory_layout.mamba2_parts(config, "mixer"),
        modules=modules,
        norms={"self_attention_norm": "norm"},
        others=memory_layout.mamba2_tensors(config, "mixer"),
        prefix=prefix,
        table="embeddings",
        final_norm="norm_f",
    )
    if not config.experts:
        return recipes
    correction = {"router_correction": ("mixer.gate.e_score_correction_bias", identity)}
    return {
        **recipes,
        **expert_layout.expert_tensors(config, prefix, correction),
        **expert_layout.separate_experts(config, prefix, block="mixer", parts=PARTS),
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    title="Nemotron-H, Nemotron Nano 2 and Nemotron 3",
    read_fields=_read_nemotron_h,
    recipes=_nemotron_h_recipes,
    embedding_tables=tuple(f"{prefix}{TABLE}" for prefix in PREFIXES),
    base_prefix=PREFIX,
    prefix_aliases=(STORED,),
    unread_parts=("mtp",),
    inert={
        *("attention_bias", "attention_dropout", "hidden_dropout", "chunk_size"),
        *("expand", "initializer_range", "mamba_proj_bias", "use_cache"),
        *("mamba_ssm_cache_dtype", "use_mamba_kernels", "output_router_logits"),
        *("moe_shared_expert_overlap", "n_shared_experts", "num_logits_to_keep"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "sliding_window"),
        *("rescale_prenorm_residual", "residual_in_fp32", "time_step_floor"),
        *("time_step_limit", "time_step_max"),
    },
)
