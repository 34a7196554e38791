"""Weights in int8, with one scale per output channel.

Each column of a kernel `w [in, out]` is stored as `q = round(w / s)` in int8, where `s
= max|w| / 127` over the column; then `|w - q s| <= s / 2`. A product is `(x @ q) * s`:
the scale is applied to the output, so no kernel is ever scaled back, and the gradient
of `x` is `(g * s) @ q^T`. This is the symmetric per-channel scheme of Jacob et al. 2018
(section 2.1, zero point 0) and Wu et al. 2020 (section 3.2), for weights only.

Published integers, and numbers in float8, may have scales and zero points for groups of
inputs, `(q - z) s`. Such a kernel is widened where it is used.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Int16

LARGEST = 127


def channel_scale(
    weights: Float[np.ndarray, "*lead in out"] | Float[Array, "*lead in out"],
) -> Float[np.ndarray, "*lead out"] | Float[Array, "*lead out"]:
    """Computes the float32 scale of each output channel; 1 if all weights are 0."""
    library = weights.__array_namespace__()
    # Two reductions instead of `abs`, which would make a copy.
    largest = library.maximum(
        library.max(weights, axis=-2), -library.min(weights, axis=-2)
    )
    scale = largest.astype(np.float32) / np.float32(LARGEST)
    return library.where(scale == 0, np.float32(1), scale)


def quantize(
    weights: Float[np.ndarray, "*lead in out"] | Float[Array, "*lead in out"],
    scale: Float[np.ndarray, "*lead out"] | Float[Array, "*lead out"],
) -> Int8[np.ndarray, "*lead in out"] | Int8[Array, "*lead in out"]:
    """Rounds finite weights to integer multiples of their channel's scale."""
    library = weights.__array_namespace__()
    wide = weights.astype(np.float32)
    # [..., in, out] / [..., 1, out]
    return library.round(wide / scale[..., None, :]).astype(np.int8)


def widen(
    kernel: Int8[Array, "in out"] | Float[Array, "in out"],
    scale: Float32[Array, "groups out"],
    zero: Int16[Array, "groups out"] | None,
) -> Float32[Array, "in out"]:
    """Dequantizes a kernel in groups of inputs."""
    grouped = kernel.reshape(len(scale), -1, kernel.shape[1]).astype(jnp.float32)
    if zero is not None:
        grouped = grouped - zero[:, None].astype(jnp.float32)
    return (grouped * scale[:, None]).reshape(kernel.shape)
