"""cuDNN's fused attention kernel, for NVIDIA GPUs.

`jax.nn.dot_product_attention` supports only one source: it passes its own log-sum-exp
to cuDNN's backward pass, and drops the gradient of the log-sum-exp that it returns. So
we call the functions underneath. JAX does not promise to keep these stable; their
parameters are checked when a model is opened.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.private_parts import private_part
from prompt_tuning.models.fused_kernel import (
    FusedKernel,
    Keys,
    LogSumExp,
    Obstacle,
    Query,
    Segments,
    dtype_obstacle,
)

# Typed loosely: the functions are private, and decorators hide their parameters.
cudnn: Any = private_part("jax._src.cudnn.fused_attention_stablehlo")

FORWARD = "_dot_product_attention_fwd_impl"
BACKWARD = "_dot_product_attention_bwd_impl"

HOPPER, AMPERE = (9, 0), (8, 0)
WIDEST, WIDEST_BEFORE_HOPPER = 256, 128
_ARRAYS = (
    "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets",
    "kv_offsets", "page_table_k", "page_table_v",
)  # fmt: skip
_SETTINGS = (
    "scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout",
    "sliding_window_length",
)  # fmt: skip
_FORWARD = (*_ARRAYS, *_SETTINGS, "is_training")
_BACKWARD = (*_ARRAYS, "activation", "fwd_output", "grad_output", *_SETTINGS)
_UNSCORED: Mapping[str, Any] = {"score_mod_args": (), "score_mod": None}
"""Parameters of JAX 0.12 for a function of the scores, of which there is none."""


def forward(
    query: Query,
    keys: Keys,
    values: Keys,
    segments: Segments,
    scale: float,
    causal: bool,
) -> tuple[Query, LogSumExp]:
    """Computes the output and the log-sum-exp; see `FusedKernel`."""
    assert segments is None  # the kernel does not pack
    output, log_sum_exp = getattr(cudnn, FORWARD)(
        query,
        keys[:, None],
        values[:, None],
        *_absent(query),
        is_training=True,
        **_settings(scale, causal),
    )
    return output, log_sum_exp


def backward(
    query: Query,
    keys: Keys,
    values: Keys,
    segments: Segments,
    output: Query,
    log_sum_exp: LogSumExp,
    d_output: Query,
    scale: float,
    causal: bool,
) -> tuple[Query, Keys, Keys]:
    """Computes the gradients of query, keys and values; see `FusedKernel`."""
    assert segments is None  # the kernel does not pack
    d_query, d_keys, d_values = getattr(cudnn, BACKWARD)(
        query,
        keys[:, None],
        values[:, None],
        *_absent(query),
        log_sum_exp,
        output,
        d_output,
        **_settings(scale, causal),
    )
    return d_query, d_keys[:, 0], d_values[:, 0]


def _absent(query: Query) -> list[Any]:
    """Returns empty arrays, which stand for absent ones."""
    return [jnp.zeros(0, query.dtype)] * (len(_ARRAYS) - 3)


def _settings(scale: float, causal: bool) -> dict[str, Any]:
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    return {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": cudnn.AttentionLayout.BNTH.value,
        "sliding_window_length": None,
        **(_UNSCORED if _scores() else {}),
    }


def _scores() -> bool:
    """Tests whether this JAX has the parameters of `_UNSCORED`."""
    return "score_mod" in inspect.signature(getattr(cudnn, FORWARD)).parameters


def obstacle(config: ModelConfig) -> Obstacle | None:
    """Returns why cuDNN cannot run a model's attention here, or None."""
    if narrow := dtype_obstacle(config) or width_obstacle(config.head_width, WIDEST):
        return narrow
    if changed := _changed():
        return Obstacle(
            f"JAX {jax.__version__} calls cuDNN in another way ({changed} changed)",
            "install a JAX from 0.10.2 to 0.12.0",
        )
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version or cudnn.cuda_versions is None:
        return Obstacle(
            f"cuDNN is not installed for {device.device_kind}",
            "install jax[cuda12] or jax[cuda13]",
        )
    capability = tuple(map(int, device.compute_capability.split(".")))
    if capability < AMPERE:
        return Obstacle(
            f"{device.device_kind} has compute capability {device.compute_capability}, "
            "and the kernel needs 8.0",
            "use a GPU of the Ampere generation or later",
        )
    widest = WIDEST if capability >= HOPPER else WIDEST_BEFORE_HOPPER
    return width_obstacle(config.head_width, widest)


def width_obstacle(width: int, most: int) -> Obstacle | None:
    """Returns why cuDNN does not support a head width, or None."""
    if width % 8 == 0 and width <= most:
        return None
    return Obstacle(
        f"the model's heads have width {width}, and cuDNN's kernel needs a multiple of "
        f"8, at most {most}",
        "use another model",
    )


def _changed() -> str | None:
    """Returns the first JAX function with unexpected parameters, or None."""
    for name, expected in ((FORWARD, _FORWARD), (BACKWARD, _BACKWARD)):
        function = getattr(cudnn, name, None)
        parameters = inspect.signature(function).parameters if function else ()
        if tuple(x for x in parameters if x not in _UNSCORED) != expected:
            return name
    return None


KERNEL = FusedKernel("cuDNN", forward, backward, packs=False, obstacle=obstacle)
