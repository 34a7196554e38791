"""Falcon-H1: attention and Mamba-2 next to each other in every layer."""

from prompt_tuning.families import memory_layout
from prompt_tuning.families.bamba import BAMBA
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.llama_layout import read_rotated

FACTORS = {
    "attention_in_multiplier": tuple(
        f"self_attention/{x}" for x in ("query", "key", "value")
    ),
    "key_multiplier": ("self_attention/key",),
    "attention_out_multiplier": ("self_attention/out",),
    "ssm_in_multiplier": tuple(
        f"mamba2/{x}" for x in ("gate", "value", "key", "query", "step")
    ),
    "ssm_out_multiplier": ("mamba2/output",),
}
"""Projections that each setting multiplies, in the order of lists of settings."""
LISTS = {
    "ssm_multipliers": FACTORS["ssm_in_multiplier"],
    "mlp_multipliers": ("mlp/gate", "mlp/down"),
}


def _read_falcon_h1(settings: HuggingFaceSettings) -> ModelFields:
    for name in ("attention_bias", "mlp_bias", "projectors_bias"):
        settings.require(name, False, "biases are not implemented")
    fields = read_rotated(settings, epsilon=1e-5)
    inner = None  # a null stands for the expanded width
    if settings.values.get("mamba_d_ssm", 0) is not None:
        inner = settings.size("mamba_d_ssm", 1024)
    normalized = settings.flag("mamba_rms_norm", False)
    if normalized and settings.flag("mamba_norm_before_gate", True):
        settings.refuse("mamba_norm_before_gate", "False: other norms are unknown")
    layers, width = range(fields["layers"]), fields["width"]
    return {
        **fields,
        **memory_layout.read_expanded(settings, layers, width, inner),
        "key_value_heads": settings.size("num_key_value_heads", 8),
        "recurrence_beside_attention": True,
        "recurrent_norm": normalized,
        "embedding_multiplier": settings.positive("embedding_multiplier", 1.0),
        "logit_multiplier": settings.positive("lm_head_multiplier", 1.0),
        "projection_multipliers": _read_multipliers(settings),
    }


def _read_multipliers(settings: HuggingFaceSettings) -> tuple[tuple[str, float], ...]:
    """Returns the factors of the projections that have one."""
    found: dict[str, float] = {}
    for name, paths in FACTORS.items():
        factor = settings.positive(name, 1.0)
        found |= {path: found.get(path, 1.0) * factor for path in paths}
    for name, paths in LISTS.items():
        factors = settings.numbers(name) if name in settings else [1.0] * len(paths)
        if len(factors) != len(paths):
            settings.refuse(name, f"a list of {len(paths)} numbers")
        for path, factor in zip(paths, factors, strict=True):
            found[path] = found.get(path, 1.0) * factor
    return tuple((path, x) for path, x in found.items() if x != 1)


FALCON_H1 = BAMBA.like("falcon_h1", "Falcon-H1", _read_falcon_h1, scales_ids=True)
