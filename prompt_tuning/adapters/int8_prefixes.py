"""Key/value prefixes in int8, with a scale per head and slot.

A vector of `K` numbers takes `K + 4` bytes: a quarter of float32, and half of bfloat16.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.quantization.channels import channel_scale, quantize

CODES, SCALES = "prefix_codes", "prefix_scales"
"""Names of a file's tensors, `[L, 2, P, G, K]` and `[L, 2, P, G]`."""


def to_int8(prefix: Float[np.ndarray, "L 2 P G K"]) -> dict[str, np.ndarray]:
    """Returns the tensors that encode a prefix."""
    vectors = np.asarray(prefix, np.float32)[..., None]  # [L, 2, P, G, K, 1]
    scale = np.asarray(channel_scale(vectors))
    codes = np.asarray(quantize(vectors, scale))
    return {CODES: codes[..., 0], SCALES: scale[..., 0]}


def from_int8(
    tensors: Mapping[str, np.ndarray], source: str
) -> Float[np.ndarray, "L 2 P G K"]:
    """Decodes the prefix in some tensors.

    Raises:
      InputError: if their types or shapes are not what `to_int8` writes.
    """
    codes, scales = tensors[CODES], tensors[SCALES]
    kinds = (codes.dtype, scales.dtype) == (np.int8, np.float32)
    if not kinds or codes.ndim != 5 or scales.shape != codes.shape[:-1]:
        found = {name: f"{x.dtype}{list(x.shape)}" for name, x in tensors.items()}
        raise InputError(
            f"{source} has {shown(found)}, expected int8 [L, 2, P, G, K] and a float32 "
            "scale [L, 2, P, G] of each head of each slot"
        )
    return codes * scales[..., None]
