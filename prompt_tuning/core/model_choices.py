"""Names of the choices in `ModelConfig`, and checks of their combinations."""

from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.quantization.stores import DTYPES, PARAMETER_DTYPES, STORES

Architecture = Literal["decoder_only", "encoder_decoder"]
Norm = Literal["rms", "rms_plus_one", "layer", "layer_scale", "layer_fixed"]
NormPlacement = Literal["before", "after", "around", "after_sum"]
QueryKeyNorm = Literal["none", "head", "each_head", "width", "head_after", "rotated"]
Positions = Literal[
    "rotary",
    "learned",
    "sinusoidal",
    "sinusoidal_from_2",
    "relative",
    "disentangled",
    "alibi",
    "none",
]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
TransformActivation = Literal[Activation, "tanh"]
Pooling = Literal["last", "first", "mean"]
ClassProblem = Literal["single_label", "multi_label", "regression", "tokens"]
"""What a head of classes decides: one class of a text, which of the classes, numbers,
or the class of each token."""
WITH_VALUES: tuple[ClassProblem, ...] = ("multi_label", "regression")
"""Problems where each class has a value."""
UNRANKED: tuple[ClassProblem, ...] = ("regression", "tokens")
"""Problems without one right class of each text, so without `label_accuracy`."""
Biases = Literal["none", "qkv", "attention", "latent", "mlp", "out_mlp", "all"]
_QKV, _MLP = ("query", "key", "value"), ("gate", "up", "down")
BIASED: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv": _QKV,
    "attention": (*_QKV, "out"),
    "latent": ("query_down", "key_value_down", "out"),
    "mlp": _MLP,
    "out_mlp": ("out", *_MLP),
    "all": (*_QKV, "out", *_MLP),
}
"""Projections of a block that have a bias, for each choice of `Biases`."""
Routing = Literal[
    "softmax", "sigmoid", "sigmoid_inputs", "sparse_mixer", "separate_norms"
]
Recurrence = Literal[
    "none", "short_convolution", "gated_delta", "mamba2", "mamba", "lightning"
]
EncoderInput = Literal["text_eos", "bos_text_eos", "bos_text"]
AttentionMethod = Literal["auto", "reference", "flash"]

GROUP_SCORES = 2
"""Number of experts whose scores are the score of a group of experts."""

FLOAT16_REASON = (
    "float16 overflows at 65,504, which T5's residual stream and a prompt trained at "
    "learning rate 0.3 both pass; use bfloat16 or float32"
)


def check_combinations(config: Any) -> None:
    """Checks that no choices of a `ModelConfig` exclude each other.

    Raises:
      InputError: names both choices.
    """
    if config.heads % config.key_value_heads:
        raise InputError(
            f"{config.heads} query heads cannot share {config.key_value_heads} "
            "key/value heads: the first must be a multiple of the second"
        )
    if config.positions == "rotary" and config.rotated_width % 2:
        name = "head_width" if config.rotary_width is None else "rotary_width"
        raise InputError(
            f"rotary positions rotate pairs of elements, but {name} is "
            f"{config.rotated_width}: expected an even {name}"
        )
    causal = config.architecture == "decoder_only" and not config.bidirectional
    if config.positions == "relative" and causal:
        raise InputError(
            "relative positions are for models with an encoder: the rows of a "
            "decoder-only model each have their own positions"
        )
    if config.positions == "learned" and config.maximum_positions is None:
        raise InputError("learned positions need maximum_positions, found None")
    if config.positions == "disentangled" and not config.bidirectional:
        raise InputError(
            "disentangled positions are for encoders alone, with bidirectional=True"
        )
    if config.positions == "alibi" and config.architecture == "encoder_decoder":
        raise InputError("linear biases (alibi) are for decoder-only models")
    several = config.window_rotary_base is not None or config.unrotated_layers
    if several and config.architecture == "encoder_decoder":
        raise InputError(
            "window_rotary_base and unrotated_layers are for decoder-only models"
        )
    if config.separate_tables and config.architecture == "decoder_only":
        raise InputError("separate_tables are for encoder-decoder models")
    first = config.norm_placement == "before"
    if config.shared_norm and not (config.parallel and first):
        raise InputError(
            "shared_norm needs parallel layers with a norm before them, found "
            f"parallel={config.parallel} and "
            f"norm_placement={shown(config.norm_placement)}"
        )
    if config.parallel and config.norm_placement == "after_sum":
        raise InputError("norms after the sum need layers one after the other")
    if config.chunked and not config.windowed_layers:
        raise InputError("chunked needs windowed_layers, found none")
    latent = config.key_value_rank > 0
    if (
        latent != (config.value_width is not None)
        or (config.query_rank > 0 and not latent)
        or (latent and not _fits_latent_attention(config))
    ):
        raise InputError(
            "latent attention needs key_value_rank and value_width, a rotary_width "
            "below the head_width, a key/value head for each query head, and neither "
            "gates, sinks nor norms of heads, in a decoder-only model; other attention "
            "has no key_value_rank, query_rank and value_width"
        )
    for check in (_check_mixers, _check_full_attention, _check_experts):
        check(config)


def _check_full_attention(config: Any) -> None:
    """Checks the choices for layers with heads of other sizes."""
    width, groups = config.windowed_head_width, config.full_key_value_heads
    fits = (
        config.windowed_layers
        and not width % 2
        and config.rotary_width is None
        and not (config.recurrent_layers or config.feed_forward_layers)
        and not (config.key_value_rank or config.encoder_layers or config.chunked)
        and not config.unrotated_layers
    )
    needing = groups, config.keys_as_values, config.sharing_layers
    if (width and not fits) or (any(needing) and not width):
        raise InputError(
            "full_key_value_heads, keys_as_values and sharing_layers need a "
            "windowed_head_width, and that needs windowed_layers of a decoder with "
            "attention in every layer, without latent attention, chunks, "
            "unrotated_layers and rotary_width; found "
            f" windowed_head_width={width}"
        )
    if groups and config.key_value_heads % groups:
        raise InputError(
            f"{config.key_value_heads} key_value_heads are no multiple of "
            f"{groups} full_key_value_heads, as they must be"
        )
    unshared = set(range(config.layers - config.sharing_layers))
    if config.sharing_layers and not (
        unshared.intersection(config.windowed_layers)
        and unshared.difference(config.windowed_layers)
    ):
        raise InputError(
            f"the last {config.sharing_layers} layers share keys and values of earlier "
            "ones, expected both a layer with a window and one without before them"
        )


def _fits_latent_attention(config: Any) -> bool:
    """Tests whether the other choices of a `ModelConfig` allow latent attention."""
    return (
        config.positions == "rotary"
        and config.rotated_width < config.head_width
        and config.key_value_heads == config.heads
        and config.query_key_norm == "none"
        and not (config.gated_attention or config.attention_sinks)
        and config.architecture == "decoder_only"
    )


def _check_mixers(config: Any) -> None:
    """Checks the choices for layers with mixers other than attention, or none."""
    some = bool(config.recurrent_layers)
    wide = config.convolution_width > 1
    convolves = some and config.recurrence != "lightning"
    if some != (config.recurrence != "none") or convolves != wide:
        raise InputError(
            "recurrent layers need a recurrence and, except for lightning attention, "
            "a convolution_width of at least 2, "
            f"found recurrent_layers={shown(config.recurrent_layers)}, "
            f"recurrence={shown(config.recurrence)} and "
            f"convolution_width={config.convolution_width}"
        )
    _check_memories(config)
    if some and config.architecture == "encoder_decoder":
        raise InputError("recurrent_layers are for decoder-only models")
    if config.recurrence_beside_attention and not (
        some and not (config.feed_forward_layers or config.recurrent_norms_before)
    ):
        raise InputError(
            "recurrence_beside_attention needs recurrent_layers, and neither "
            "feed_forward_layers nor recurrent_norms_before"
        )
    if config.recurrent_norms_before and not (
        some and config.norm_placement == "after"
    ):
        raise InputError(
            "recurrent_norms_before needs recurrent_layers and norm_placement='after'"
        )
    alone = set(config.feed_forward_layers)
    if alone & {*config.recurrent_layers} or (
        alone
        and (
            config.norm_placement != "before"
            or config.encoder_layers
            or config.parallel
            or not alone >= {*config.dense_layers}
        )
    ):
        raise InputError(
            "feed_forward_layers are layers of a decoder that have a norm before them "
            "and no mixer; dense_layers are some of them, recurrent_layers are not"
        )
    needing = config.experts, config.dense_layers, alone, config.encoder_layers
    if not config.feed_forward_width and (any(needing) or not some):
        raise InputError(
            "feed_forward_width is 0, which is for decoders with recurrent_layers, and "
            "without experts, dense_layers and feed_forward_layers"
        )


def _check_memories(config: Any) -> None:
    """Checks the sizes of recurrent layers that remember more than a window."""
    heads = config.recurrent_heads, config.recurrent_key_heads
    sizes = (*heads, config.recurrent_width, config.recurrent_key_width)
    remembers = config.recurrence not in ("none", "short_convolution")
    if remembers != all(sizes) or any(sizes) != all(sizes):
        raise InputError(
            "all recurrences but 'short_convolution', and no other choice, need "
            "recurrent_heads, recurrent_key_heads, recurrent_width and "
            f"recurrent_key_width above 0, found {shown(config.recurrence)} and {sizes}"
        )
    is_mamba = config.recurrence == "mamba"
    if is_mamba != (config.step_rank > 0) or (is_mamba and sizes[1:3] != (1, 1)):
        raise InputError(
            "the recurrence 'mamba', and no other, needs a step_rank above 0, and has "
            f"one recurrent_key_heads and a recurrent_width of 1, found "
            f"{shown(config.recurrence)}, {config.step_rank} and {sizes[1:3]}"
        )
    if all(sizes) and heads[0] % heads[1]:
        raise InputError(
            f"{heads[0]} recurrent_heads cannot share {heads[1]} recurrent_key_heads: "
            "the first must be a multiple of the second"
        )


def check_layers(config: Any) -> None:
    """Checks the choices of a `ModelConfig` that differ between layers.

    Raises:
      InputError: for a layer that does not exist, or windows of unknown size.
    """
    for name, layers in (
        ("windowed_layers", config.layers),
        ("encoder_windowed_layers", config.encoder_layers),
        ("unrotated_layers", config.layers),
        ("recurrent_layers", config.layers),
        ("feed_forward_layers", config.layers),
        ("dense_layers", config.layers),
    ):
        numbers = getattr(config, name)
        if any(not 0 <= number < layers for number in numbers):
            raise InputError(
                f"ModelConfig.{name} is {shown(numbers)}, expected numbers from 0 to "
                f"{layers - 1}"
            )
        if numbers and "windowed" in name and config.window is None:
            raise InputError(f"{name} need a window, found None")


def check_dtype(name: str, value: str) -> None:
    """Checks that training is stable in a dtype.

    Raises:
      InputError: for float16 (with the reason), a quantized store as the dtype of
        activations, or an unknown name.
    """
    if value in ("float16", "half", "fp16"):
        raise InputError(f"{name} is {shown(value)}: {FLOAT16_REASON}")
    accepted = PARAMETER_DTYPES if name == "parameter_dtype" else DTYPES
    if value not in accepted:
        listed = " or ".join(map(repr, accepted))
        hint = f"; {value} is for parameter_dtype" if value in STORES else ""
        raise InputError(f"{name} is {shown(value)}, expected {listed}{hint}")


def _check_experts(config: Any) -> None:
    """Checks the choices for layers with experts, and for models without."""
    if config.experts and not 1 <= config.experts_per_token <= config.experts:
        raise InputError(
            f"experts_per_token is {config.experts_per_token}, expected a number "
            f"from 1 to {config.experts}"
        )
    if config.experts:
        _check_groups(config)
    if config.experts and not config.gated and config.biased_projections:
        raise InputError("experts without gates have no biases")
    biased = "gate" in config.biased_projections
    if config.routing == "sigmoid_inputs" and biased:
        raise InputError("experts whose inputs are weighed have no biases")
    some = bool(config.dense_layers)
    every = len(set(config.feed_forward_layers)) or config.layers
    if some != (config.dense_width > 0) or (
        some
        and (
            not (config.experts or config.sharing_layers)
            or len(set(config.dense_layers)) >= every
        )
    ):
        raise InputError(
            "dense_layers are some of the layers of a model with experts, and have a "
            f"dense_width; found dense_layers={shown(config.dense_layers)} of "
            f"{config.layers} layers, dense_width={config.dense_width} and "
            f"experts={config.experts}"
        )


def _check_groups(config: Any) -> None:
    """Checks that the experts of a token fit into its groups of experts."""
    size, rest = divmod(config.experts, config.expert_groups)
    used = config.expert_groups_per_token
    if rest or not 1 <= used <= config.expert_groups:
        raise InputError(
            f"{config.experts} experts in {config.expert_groups} groups, of which a "
            f"token uses {used}: expected equal groups, and some or all of them"
        )
    if config.expert_groups > 1 and (
        size < GROUP_SCORES or size * used < config.experts_per_token
    ):
        raise InputError(
            f"groups of {size} experts, of which a token uses {used} with "
            f"{config.experts_per_token} experts: expected groups of at least "
            f"{GROUP_SCORES} experts, with as many experts as a token uses"
        )
