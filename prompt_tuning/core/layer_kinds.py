"""Which layers have which parts, and how their order repeats.

A layer's *mixers* are the parts that move information between positions: attention, or
a recurrent mixer, which remembers a state of fixed size. In some models with experts, a
few layers have a dense feed-forward layer instead. In others each layer has either a
mixer or a feed-forward layer. Parameters of a part are stacked on the layers that have
it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.core.model_config import ModelConfig

ATTENTION = "self_attention"
"""Name of attention among the mixers, and in the paths of its parameters."""
FULL_ATTENTION = "full_attention"
"""That of attention without a window, where its heads have other sizes."""
ATTENTIONS = (ATTENTION, FULL_ATTENTION)
KEYS = "keys_and_values"
"""Name of what these leave behind, which is stacked on the layers with any of them."""
SHARING = {ATTENTION: "shared_attention", FULL_ATTENTION: "shared_full_attention"}
"""Attention to the keys and values of the last earlier layer of each kind."""
FEED_FORWARD, DENSE = "mlp", "dense_mlp"
"""Names of feed-forward layers; the second is that of layers without experts."""
NORMS_BEFORE = ("self_attention_norm", "mlp_norm")
NORMS_AFTER = ("self_attention_out_norm", "mlp_out_norm")
MIXERS = {
    "short_convolution": "a short convolution",
    "gated_delta": "the gated delta rule",
    "mamba2": "Mamba-2",
    "mamba": "Mamba",
    "lightning": "lightning attention",
}
"""Names of the recurrent mixers in messages."""
USUAL = (ATTENTION, FEED_FORWARD)
"""The kind of most layers."""


def mixers(config: "ModelConfig") -> list[tuple[str, ...]]:
    """Returns the mixers of each decoder layer, whose outputs are added."""
    recurrent, found = set(config.recurrent_layers), []
    full = set(range(config.layers)) - set(config.windowed_layers)
    for i in range(config.layers):
        attention = ATTENTION
        if config.windowed_head_width and i in full:
            attention = FULL_ATTENTION
        if i >= config.layers - config.sharing_layers:
            attention = SHARING[attention]
        absent = set(config.feed_forward_layers)
        absent |= set() if config.recurrence_beside_attention else recurrent
        found.append(
            (
                *([] if i in absent else [attention]),
                *([config.recurrence] if i in recurrent else []),
            )
        )
    return found


def layer_kinds(config: "ModelConfig") -> tuple[tuple[str, ...], ...]:
    """Returns the parts of each decoder layer, mixers first.

    Norms are named only if layers differ in them.
    """
    dense, alone, kinds = set(config.dense_layers), config.feed_forward_layers, []
    for i, layer_mixers in enumerate(mixers(config)):
        feed_forward = DENSE if i in dense else FEED_FORWARD
        single = layer_mixers and (alone or not config.feed_forward_width)
        kind = layer_mixers if single else (*layer_mixers, feed_forward)
        if config.recurrent_norms_before:
            kind += NORMS_BEFORE if config.recurrence in layer_mixers else NORMS_AFTER
        kinds.append(kind)
    return tuple(kinds)


def attention_sizes(config: "ModelConfig", kind: str) -> tuple[int, int]:
    """Returns the head width and number `G` of heads of a kind of attention."""
    if config.windowed_head_width and kind in (ATTENTION, SHARING[ATTENTION]):
        return config.windowed_head_width, config.key_value_heads
    full = kind == FULL_ATTENTION and config.full_key_value_heads
    return config.head_width, full or config.key_value_heads


def kept_by(kind: Sequence[str]) -> list[str]:
    """Returns the names of what a layer keeps for later positions: keys or a state."""
    kept = {**dict.fromkeys(ATTENTIONS, KEYS), **{name: name for name in MIXERS}}
    return [kept[part] for part in kind if part in kept]


def key_layers(config: "ModelConfig") -> int:
    """Returns how many decoder layers have keys and values."""
    return sum(KEYS in kept_by(kind) for kind in mixers(config))


def key_value_sizes(
    config: "ModelConfig", *, compressed: bool = False
) -> tuple[int, int, int]:
    """Returns the number of heads of keys and values as kept, and their two widths.

    Args:
      config: the model's.
      compressed: whether it is the compressed form of latent attention.
    """
    if compressed:
        return 1, config.rotated_width, config.key_value_rank
    return config.key_value_heads, config.head_width, config.head_width


def shared_layers(config: "ModelConfig") -> dict[str, int]:
    """Returns the layer whose keys and values each kind of `SHARING` reads."""
    found = mixers(config)
    return {
        shared: max(i for i, names in enumerate(found) if source in names)
        for source, shared in SHARING.items()
        if any(shared in names for names in found)
    }


def layers_with(config: "ModelConfig", path: str) -> list[int]:
    """Returns the indices of the decoder layers that have a parameter.

    `path` is relative to a layer, e.g. `self_attention/query/kernel`.
    """
    part, kinds = path.split("/")[0], layer_kinds(config)
    everywhere = part not in {name for kind in kinds for name in kind}
    return [i for i, kind in enumerate(kinds) if everywhere or part in kind]


def check_all_attention(config: "ModelConfig", found: str, remedy: str) -> None:
    """Checks that every layer of a model has attention, and no other mixer.

    The message begins with `found`, what needs this, and ends with `remedy`.

    Raises:
      InputError: if any layer is recurrent.
    """
    if config.recurrent_layers:
        beside = config.recurrence_beside_attention
        raise InputError(
            f"{found}, which needs attention {'alone ' * beside}in every layer, but "
            f"{len(config.recurrent_layers)} of the {config.layers} layers of this "
            f"model have {MIXERS[config.recurrence]} "
            f"{'beside it' if beside else 'instead'}: {remedy}"
        )
    if config.feed_forward_layers:
        raise InputError(
            f"{found}, which needs attention in every layer, but "
            f"{len(config.feed_forward_layers)} of the {config.layers} layers of this "
            f"model have a feed-forward layer alone: {remedy}"
        )


def check_alike(config: "ModelConfig", found: str, remedy: str) -> None:
    """Checks that all layers of a model have the same parts; see `check_all_attention`.

    Raises:
      InputError: if they do not.
    """
    check_all_attention(config, found, remedy)
    if config.windowed_head_width:
        raise InputError(
            f"{found}, which needs layers that are all alike, but heads of this model "
            f"have other sizes in layers with a window: {remedy}"
        )
    if config.dense_layers:
        raise InputError(
            f"{found}, which needs layers that are all alike, but "
            f"{len(config.dense_layers)} of the {config.layers} layers of this model "
            f"have no experts: {remedy}"
        )


class LayerRun(NamedTuple):
    """Consecutive layers in which a pattern of kinds repeats.

    Attributes:
      start: index of the first layer.
      pattern: kinds of the layers in one repetition.
      count: number of repetitions.
    """

    start: int
    pattern: tuple[Any, ...]
    count: int


def repetitions(kinds: Sequence[Any]) -> list[LayerRun]:
    """Divides layers into repetitions with as few layers in their patterns as possible.

    One program is compiled for each layer of a pattern.

    >>> [(x.pattern, x.count) for x in repetitions("ccaccacaca")]
    [(('c', 'c', 'a'), 2), (('c', 'a'), 2)]
    """
    layers = tuple(kinds)
    # The best division of the first layers, with the length of its patterns.
    best: list[tuple[int, list[LayerRun]]] = [(0, [])]
    for end in range(1, len(layers) + 1):
        options = []
        for period in range(1, end + 1):
            pattern = layers[end - period : end]
            start, count = end - period, 1
            while True:
                length, preceding = best[start]
                found = LayerRun(start, pattern, count)
                options.append((length + period, [*preceding, found]))
                start, count = start - period, count + 1
                if start < 0 or layers[start : start + period] != pattern:
                    break
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]
