"""Rotary positions in `config.json`: base, scaling and rotated width."""

import math
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.rotary_scaling import (
    QueryScaling,
    RotaryDivisors,
    RotaryScaling,
)
from prompt_tuning.families.hf_settings import LARGEST, HuggingFaceSettings, ModelFields

FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = ("longrope", "su")
IMPLEMENTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def read_rotary(
    settings: HuggingFaceSettings,
    head_width: int,
    *,
    base: float = 10_000.0,
    partial: float | None = None,
    partial_name: str = "partial_rotary_factor",
) -> ModelFields:
    """Reads `rope_parameters` (transformers 5), or `rope_scaling` and its companions.

    Args:
      settings: the settings in `config.json`.
      head_width: `K`.
      base: base of the frequencies if no setting has it.
      partial: rotated fraction of each head if no setting has it; None for families
        that rotate whole heads, whatever the settings are.
      partial_name: the family's name of that setting, for messages.

    Returns:
      fields of `ModelConfig`; with settings for each kind of layer, those of layers
      without a window.

    Raises:
      InputError: for an unsupported scaling, and for a rotated fraction that
        transformers would ignore, or that is not an even number of elements.
    """
    block = _rotary_block(settings)
    fraction = 1.0 if partial is None else partial
    for source in (settings, block):
        base = source.positive("rope_theta", base)
        name = "partial_rotary_factor"
        fraction = source.number(name, fraction, minimum=0, maximum=1)
        partial_name = name if name in source else partial_name
        if partial is None and fraction != 1:
            source.refuse(name, "1: models of this family rotate whole heads")
    width = int(head_width * fraction)
    if width != head_width and (width % 2 or not width):
        raise InputError(
            f"{settings.source} rotates {fraction:g} of each head ({partial_name}), "
            f"which is {width} of its {head_width} elements, expected an even number "
            "of at least 2"
        )
    fields: dict[str, Any] = {
        "rotary_base": base,
        "rotary_scaling": _read_scaling(block, settings, base, width),
        "rotary_width": None if width == head_width else width,
    }
    if _kind(block) in LONGROPE:
        fields["maximum_positions"] = _original_positions(block, settings)
    return fields


def read_rotary_dim(settings: HuggingFaceSettings, head_width: int, usual: int) -> int:
    """Reads the number of rotated elements of each head, `rotary_dim`.

    Args:
      settings: the settings in `config.json`.
      head_width: `K`.
      usual: the number if there is no setting.

    Raises:
      InputError: if it is odd, or larger than a head.
    """
    rotated = settings.size("rotary_dim", usual)
    if rotated % 2 or rotated > head_width:
        expected = f"an even number up to the width of a head, {head_width}"
        settings.refuse("rotary_dim", expected)
    return rotated


def read_window_rotary(settings: HuggingFaceSettings, base: float) -> ModelFields:
    """Reads the base of the rotary frequencies in layers with a window.

    Raises:
      InputError: if these layers' frequencies are scaled, or the rest are scaled by the
        old key `type`.
    """
    full = _rotary_block(settings)
    if "rope_type" not in full and full.text("type", "default") != "default":
        unclear = "transformers 4 reads `type` in this family, and 5 ignores it"
        full.refuse("type", f"the key rope_type: {unclear}")
    block = _block(settings, "rope_parameters", SLIDING)
    block.require("rope_type", "default", "scaling in windowed layers is unknown")
    return {"window_rotary_base": block.positive("rope_theta", base)}


def read_proportional(
    settings: HuggingFaceSettings, head_width: int, *, base: float, partial: float
) -> ModelFields:
    """Reads frequencies of whole heads in which only the highest turn (Gemma 4).

    `base` and `partial` (the fraction that turns) are defaults.

    Raises:
      InputError: for another scaling.
    """
    block = _rotary_block(settings)
    block.choose("rope_type", ("proportional", "default"))
    fields = {"rotary_base": block.positive("rope_theta", base)}
    if block.text("rope_type", "proportional") == "default":
        return fields
    usual = 1.0 if block.values else partial
    fraction = block.number("partial_rotary_factor", usual, minimum=0, maximum=1)
    turning, half = int(fraction * head_width // 2), head_width // 2
    divisors = [block.positive("factor", 1.0)] * turning
    divisors += [LARGEST] * (half - turning)
    return fields | {"rotary_scaling": RotaryDivisors(divisors=tuple(divisors))}


def read_query_scaling(settings: HuggingFaceSettings) -> ModelFields:
    """Reads the factor of queries by position, next to the rotary settings."""
    block = _rotary_block(settings)
    slope = block.number("llama_4_scaling_beta", minimum=0)
    if not slope:
        return {}
    name = "original_max_position_embeddings"
    scaling = QueryScaling(slope=slope, positions=block.integer(name, minimum=1))
    return {"query_scaling": scaling}


def read_score_scale(settings: HuggingFaceSettings) -> float:
    """Reads the additional factor of scores from YaRN (DeepSeek V3)."""
    block = _rotary_block(settings)
    scale = block.number("mscale_all_dim", 0.0)
    if _kind(block) == "default" or not scale:
        return 1.0
    return _yarn_magnitude(block.positive("factor"), scale) ** 2


def read_short_magnitude(settings: HuggingFaceSettings) -> float:
    """Reads the factor of rotated elements within the original context (Phi 3.5 MoE).

    Raises:
      InputError: if the rotary settings lack it.
    """
    return _rotary_block(settings).positive("short_mscale")


def read_stretched_base(
    settings: HuggingFaceSettings, base: float, head_width: int
) -> float:
    """Returns the base with the factor of a fixed "dynamic" scaling (Hunyuan)."""
    block = _rotary_block(settings)
    if _kind(block) != "dynamic":
        return base
    exponent = head_width / (head_width - 2) if head_width > 2 else 1.0
    return base * block.positive("alpha", 1.0) ** exponent


def _rotary_block(settings: HuggingFaceSettings) -> HuggingFaceSettings:
    """Returns the settings of layers without a window.

    As in transformers 5, `rope_scaling` replaces `rope_parameters`, unless these are
    given for each kind of layer.
    """
    block = _block(settings, "rope_parameters", FULL)
    scaling = _block(settings, "rope_scaling", FULL)
    if not scaling.values:
        return block
    if FULL not in settings.nested("rope_parameters", {}):
        return scaling
    return HuggingFaceSettings(scaling.source, {**block.values, **scaling.values})


def _block(settings: HuggingFaceSettings, name: str, kind: str) -> HuggingFaceSettings:
    """Returns the settings of one kind of layer; empty if there are none."""
    values = settings.nested(name, {})
    source = f"{name} in {settings.source}"
    if FULL in values or SLIDING in values:
        values, source = values.nested(kind, {}), f"{kind} in {source}"
    return HuggingFaceSettings(source, values.values)


def _read_scaling(
    rope: HuggingFaceSettings, settings: HuggingFaceSettings, base: float, width: int
) -> RotaryScaling | RotaryDivisors | None:
    kind = _kind(rope)
    if kind == "default":
        return None
    source = rope.source
    rope = HuggingFaceSettings(f"the rope_type {shown(kind)} in {source}", rope.values)
    if kind == "dynamic":
        # It changes the base for rows longer than `max_position_embeddings`, which are
        # refused: transformers changes it for the whole batch, and for later ones.
        rope.positive("factor")
        return None
    if kind == "linear":
        return RotaryScaling(factor=rope.positive("factor"))
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if low >= high:
            rope.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
        return RotaryScaling(
            factor=rope.positive("factor"),
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_positions=_original_positions(rope, settings),
        )
    if kind == "yarn":
        return _yarn(rope, _original_positions(rope, settings), base, width)
    if kind in LONGROPE:
        return _longrope(rope, settings, width)
    raise InputError(
        f"{source} has the rope_type {shown(kind)}, expected one of "
        f"{', '.join(map(repr, IMPLEMENTED))}; others are not implemented"
    )


def _yarn(
    rope: HuggingFaceSettings, original: int, base: float, width: int
) -> RotaryDivisors:
    """Returns YaRN's scaling (Peng et al. 2023, section 3.2 and equation 22).

    Frequencies that turn more than `beta_fast` times within the original context are
    unchanged, and those that turn less than `beta_slow` times are divided.
    """
    factor = rope.positive("factor")

    def dimension(turns: float) -> float:
        """Returns the pair that turns so many times within the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(rope.positive("beta_fast", 32.0))
    high = dimension(rope.positive("beta_slow", 1.0))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    divided = [min(max((pair - low) / span, 0), 1) for pair in range(width // 2)]
    magnitude = _yarn_magnitude(factor, 1.0)
    scales = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if all(scales):
        above, below = (_yarn_magnitude(factor, scale) for scale in scales)
        magnitude = above / below
    return RotaryDivisors(
        divisors=tuple(1 / (part / factor + 1 - part) for part in divided),
        magnitude=rope.positive("attention_factor", magnitude),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(
    rope: HuggingFaceSettings, settings: HuggingFaceSettings, width: int
) -> RotaryDivisors:
    """Returns LongRoPE's short factors (Ding et al. 2024, section 3.3).

    transformers switches the whole batch to the long ones if one row exceeds the
    original context; such rows are not supported, see `read_rotary`.
    """
    divisors = rope.sequence("short_factor")
    if len(divisors) != width // 2 or not all(
        type(number) in (int, float) for number in divisors
    ):
        rope.refuse("short_factor", f"a list of {width // 2} numbers")
    original = _original_positions(rope, settings)
    maximum = settings.integer("max_position_embeddings", minimum=1)
    factor = rope.positive("factor", maximum / original)
    magnitude = 1.0
    if factor > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    return RotaryDivisors(
        divisors=tuple(map(float, divisors)),
        note="; LongRoPE's long factors, for longer rows, are not implemented",
        magnitude=rope.positive("attention_factor", magnitude),
    )


def _kind(rope: HuggingFaceSettings) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _original_positions(
    rope: HuggingFaceSettings, settings: HuggingFaceSettings
) -> int:
    """Returns the context length of a model's first training.

    As in transformers, a setting of the model (Phi-3) precedes the scaling's, and the
    default is `max_position_embeddings`.
    """
    name = "original_max_position_embeddings"
    for source in (settings, rope):
        if name in source:
            return source.integer(name, minimum=2)
    return settings.integer("max_position_embeddings", minimum=2)
