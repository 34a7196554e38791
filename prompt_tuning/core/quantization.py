"""Weights in int8, with one scale per output channel; activations are not quantized.

Each column of a kernel `w [in, out]` is stored as `q = round(w / s)` in int8, where `s
= max|w| / 127` over the column; then `|w - q s| <= s / 2`. A product is `(x @ q) * s`:
the scale is applied to the output, so no kernel is ever scaled back, and the gradient
of `x` is `(g * s) @ q^T`. This is the symmetric per-channel scheme of Jacob et al. 2018
(section 2.1, zero point 0) and Wu et al. 2020 (section 3.2), for weights only.

The projections of the blocks are quantized: they hold nearly all weights, and only
matrix products read them. Embedding tables, the head, norms and biases stay in
`UNQUANTIZED`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

QUANTIZED = "int8"
UNQUANTIZED = "bfloat16"
LARGEST = 127


def scale_path(path: str) -> str:
    """Returns the path of the scales of a quantized kernel, next to the kernel."""
    return f"{path}_scale"


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


def cast_and_multiply(
    x: Float[Array, "*lead in"], kernel: Array
) -> Float[Array, "*lead out"]:
    """Computes `x @ kernel`, casting the kernel to the dtype of `x` where it is used.

    The backward pass casts again: if the cast kernel were stored for it, a scan over
    blocks would store a wide copy of the whole stack.
    """
    if kernel.dtype == x.dtype:
        return x @ kernel
    return jax.checkpoint(_cast_and_multiply, prevent_cse=False)(x, kernel)


def _cast_and_multiply(x: Array, kernel: Array) -> Array:
    return x @ kernel.astype(x.dtype)


def apply_scale(
    product: Float[Array, "*lead out"], scale: Float[Array, "out"]
) -> Float[Array, "*lead out"]:
    """Multiplies a product with a quantized kernel by the scales, in float32."""
    return (product.astype(jnp.float32) * scale).astype(product.dtype)
