"""Weights in four bits: two per byte, with one scale per group of inputs.

A code `q` of 0 to 15 stands for `(q - 8) s` in the store "int4", and for `t[q] s` in
the store "nf4", where the table `t` has the 16 values of NormalFloat (Dettmers et al.
2023, "QLoRA", appendix E): quantiles of a normal distribution, scaled to [-1, 1].
Published codes may stand for `(q - z) s` with a `z` per group, or use another table.

A group is a number of consecutive inputs of one output. The first half of a group is in
the lower halves of its bytes and the second half in the upper ones, so unpacking moves
no single weights, and a shard of whole groups can be unpacked alone.
"""

import functools
import math
import operator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int16, UInt8

from prompt_tuning.core.errors import InputError

GROUP = 64
"""Number of weights that share a scale, unless another is chosen."""
MIDDLE = 8
"""Code of the weight 0 in the store "int4"."""
LARGEST_CODE = 15
NORMAL_FLOAT = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The values of NF4, in order."""

Weights = Float[np.ndarray, "*lead in out"] | Float[Array, "*lead in out"]
Packed = UInt8[np.ndarray, "*lead half out"] | UInt8[Array, "*lead half out"]
Scales = Float32[np.ndarray, "*lead groups out"] | Float32[Array, "*lead groups out"]


def group_size(size_in: int, wanted: int = GROUP) -> int:
    """Returns the size of a group: the largest power of two that divides the inputs.

    It is at most `wanted`, which must be a power of two.

    Raises:
      InputError: if `size_in` is odd, so two weights do not fill a byte.
    """
    size = math.gcd(size_in, wanted)
    if size == 1:
        raise InputError(
            f"a projection has {size_in} inputs, and weights of four bits need an even "
            "number: store the weights in int8 or bfloat16"
        )
    return size


def pack(
    weights: Weights,
    codebook: Float32[np.ndarray, "16"] | None = None,
    group: int | None = None,
) -> tuple[Packed, Scales]:
    """Rounds finite weights to four bits, two per byte.

    Args:
      weights: kernels.
      codebook: the 16 values in order, from -1 to 1; None for integer multiples of the
        scale.
      group: number of weights that share a scale; None for `group_size`.

    Returns:
      the bytes, and the scales of all groups.
    """
    library = weights.__array_namespace__()
    *lead, size_in, size_out = weights.shape
    size = group_size(size_in) if group is None else group
    grouped = weights.astype(np.float32).reshape(*lead, -1, size, size_out)
    largest = library.max(library.abs(grouped), axis=-2)  # [..., groups, out]
    steps = (LARGEST_CODE / 2) if codebook is None else 1
    scale = library.where(largest == 0, np.float32(1), largest / np.float32(steps))
    relative = grouped / scale[..., None, :]
    if codebook is None:
        codes = library.clip(library.round(relative) + MIDDLE, 0, LARGEST_CODE)
    else:
        codes = nearest_codes(relative, codebook)
    low, high = library.split(codes.astype(np.uint8), 2, axis=-2)
    return (low | high << 4).reshape(*lead, size_in // 2, size_out), scale


def nearest_codes(
    relative: Float[np.ndarray, "*shape"] | Float[Array, "*shape"],
    codebook: Float32[np.ndarray, "16"],
) -> UInt8[np.ndarray, "*shape"] | UInt8[Array, "*shape"]:
    """Returns the codes of the nearest values in an ordered table.

    `relative` are numbers divided by their scales.
    """
    # The number of limits that a number exceeds is the code of the nearest value.
    limits = (codebook[1:] + codebook[:-1]) / 2
    exceeded = [(relative > limit).astype(np.uint8) for limit in limits]
    return functools.reduce(operator.add, exceeded)


def unpack(
    packed: UInt8[Array, "half out"],
    scale: Float32[Array, "groups out"],
    codebook: Float32[Array, "16"] | None,
    zero: Int16[Array, "groups out"] | None = None,
) -> Float32[Array, "in out"]:
    """Dequantizes one kernel."""
    half, size_out = packed.shape
    grouped = packed.reshape(len(scale), -1, size_out)
    codes = jnp.concatenate([grouped & LARGEST_CODE, grouped >> 4], axis=1)
    values = values_of_codes(codes, codebook, None if zero is None else zero[:, None])
    return (values * scale[:, None]).reshape(2 * half, size_out)


def values_of_codes(
    codes: UInt8[Array, "*shape"],
    codebook: Float32[Array, "16"] | None,
    zero: Int16[Array, "*#shape"] | None,
) -> Float32[Array, "*shape"]:
    """Returns what the codes of groups stand for, before scaling."""
    if codebook is None:
        middle = MIDDLE if zero is None else zero.astype(jnp.float32)
        return codes.astype(jnp.float32) - middle
    # A code is never past the end, so the look-up needs no check.
    return codebook.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")
