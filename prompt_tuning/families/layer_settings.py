"""Settings in `config.json` for windows, unrotated layers and soft caps."""

from collections.abc import Sequence

from prompt_tuning.core.errors import shown
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.rotary_settings import FULL, SLIDING


def read_windows(
    settings: HuggingFaceSettings,
    layers: int,
    kinds: Sequence[str],
    *,
    window: int | None = None,
    limited: str = SLIDING,
) -> ModelFields:
    """Reads the window of attention and the layers that have it.

    Args:
      settings: the settings in `config.json`.
      layers: number of layers.
      kinds: kind of each layer if `layer_types` is absent.
      window: number of positions of the window; `sliding_window` if None.
      limited: name of the kind of layers with a window.

    Raises:
      InputError: for an unsupported kind of layer, or a window of unknown size.
    """
    if window is None and not has_window(settings, 1):
        kinds = [FULL] * layers
    windowed = read_layers(settings, layers, kinds, limited)
    if not windowed:
        return {}
    if window is None:
        window = settings.integer("sliding_window", minimum=1)
    return {"window": window, "windowed_layers": windowed}


def read_layers(
    settings: HuggingFaceSettings, layers: int, kinds: Sequence[str], kind: str
) -> tuple[int, ...]:
    """Returns the indices of the layers of a kind, if all others have full attention.

    `kinds` has the kind of each layer if `layer_types` is absent.

    Raises:
      InputError: for another kind.
    """
    kinds = settings.sequence("layer_types", list(kinds))
    if len(kinds) != layers or not set(map(str, kinds)) <= {FULL, kind}:
        expected = f"a list of {layers} texts, each {FULL!r} or {kind!r}"
        settings.refuse("layer_types", expected)
    return tuple(i for i, found in enumerate(kinds) if found == kind)


def has_window(settings: HuggingFaceSettings, default: int = 0) -> bool:
    """Tests whether `sliding_window` is set; some folders have 0 for no window.

    `default` is used if the setting is missing or null.
    """
    return settings.integer("sliding_window", default, minimum=0) > 0


def alternating(layers: int, period: int) -> list[str]:
    """Returns kinds of layers; every `period`-th has no window."""
    return [SLIDING if (i + 1) % period else FULL for i in range(layers)]


def read_unrotated(settings: HuggingFaceSettings, layers: int) -> tuple[int, ...]:
    """Reads the indices of layers without rotary embedding (SmolLM3, Llama 4)."""
    interval = settings.size("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(layers)]
    # Published folders of Llama 4 have an empty list.
    rotated = settings.sequence("no_rope_layers", default) or default
    if len(rotated) != layers or any(value not in (0, 1) for value in rotated):
        expected = f"a list of {layers} numbers, each 0 or 1"
        settings.refuse("no_rope_layers", f"{expected}, found {shown(len(rotated))}")
    return tuple(i for i, value in enumerate(rotated) if not value)


SOFT_CAPS = {
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
}
"""Settings of soft caps, by our names."""


def read_soft_caps(
    settings: HuggingFaceSettings,
    *,
    attention: float | None = None,
    logits: float | None = None,
) -> ModelFields:
    """Reads the bounds of attention scores and of logits; null means no bound.

    `attention` and `logits` are the bounds if the settings are absent.
    """
    defaults = dict(zip(SOFT_CAPS, (attention, logits), strict=True))
    return {
        field: defaults[field]
        if name not in settings.values
        else settings.positive(name)
        if name in settings
        else None
        for field, name in SOFT_CAPS.items()
    }
