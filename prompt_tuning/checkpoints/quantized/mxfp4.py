"""Weights of four bits, with one exponent per block of 32 (OCP MX format, 5.2).

gpt-oss stores the kernels of experts in this way: `NAME_blocks [E, out, in / 32, 16]`,
two numbers per byte with the first in the lower half, and `NAME_scales [E, out, in /
32]`, exponents with a bias of 127. Both are kept as they are.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.quantized.codes import Codes, WidenedTensor
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.stores import MXFP4, Store
from prompt_tuning.core.typed_json import JsonObject

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_SIZE, BYTES = 32, 16
EXPONENT_BIAS = 127
_POSITIVE = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
"""Value of each code: a sign, two bits of exponent, one of mantissa."""
_CODES = np.arange(256)
PAIRS = np.stack([NUMBERS[_CODES & 0x0F], NUMBERS[_CODES >> 4]], axis=-1)
"""Both numbers of each byte."""


def read_mxfp4(
    stored: Mapping[str, StoredTensor], _: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with MXFP4's as bfloat16 arrays `[E, in, out]`.

    Raises:
      InputError: for blocks with scales missing or in another shape.
    """
    result = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith(BLOCKS) or blocks.dtype != np.uint8:
            continue
        base = name.removesuffix(BLOCKS)
        scales = stored.get(base + SCALES)
        if (
            scales is None
            or scales.dtype != np.uint8
            or len(blocks.shape) != 4
            or blocks.shape != (*scales.shape, BYTES)
        ):
            raise InputError(
                f"{blocks.source} has {name} of shape {blocks.shape}, expected uint8 "
                f"[E, out, in / 32, {BYTES}], and {base + SCALES} without the last axis"
            )
        del result[name], result[base + SCALES]
        result[base] = _unpacked(blocks, scales)
    return result


def _unpacked(blocks: StoredTensor, scales: StoredTensor) -> StoredTensor:
    experts, rows, groups, _ = blocks.shape

    def read(block: Block) -> np.ndarray:
        """Reads the groups that a block `[E, in, out]` needs, and unpacks them."""
        expert, column, row = block
        needed = (expert, row, blocks_of(column, BLOCK_SIZE))
        packed = blocks.read((*needed, slice(0, BYTES)))  # [e, out, n, 16]
        # One expert at a time, since the numbers are float32 before they are rounded.
        pairs = zip(packed, scales.read(needed), strict=True)
        array = np.stack([unpack(*pair) for pair in pairs])  # [e, out, n * 32]
        return array[..., place_in_blocks(column, BLOCK_SIZE)].swapaxes(1, 2)

    shape = (experts, groups * BLOCK_SIZE, rows)
    dtype = np.dtype(ml_dtypes.bfloat16)
    codes = _codes(blocks, scales, shape)
    return WidenedTensor(shape, dtype, blocks.source, read, codes=codes)


def _codes(
    blocks: StoredTensor, scales: StoredTensor, shape: tuple[int, int, int]
) -> Codes:
    """Returns the codes `[E, in, out]` and the scales `[E, in / 32, out]`."""

    def read(block: Block) -> np.ndarray:
        expert, column, row = block
        needed = (expert, row, blocks_of(column, BLOCK_SIZE), slice(0, BYTES))
        packed = blocks.read(needed)  # [e, out, n, 16]
        both = np.stack([packed & 0x0F, packed >> 4], axis=-1)
        array = both.reshape(*packed.shape[:2], -1)  # [e, out, n * 32]
        return array[..., place_in_blocks(column, BLOCK_SIZE)].swapaxes(1, 2)

    def read_scales(block: Block) -> np.ndarray:
        expert, group, row = block
        exponents = scales.read((expert, row, group))
        return exponents.view(ml_dtypes.float8_e8m0fnu).swapaxes(1, 2)

    experts, size_in, size_out = shape
    store = Store(MXFP4, BLOCK_SIZE)
    of_groups = (experts, size_in // BLOCK_SIZE, size_out)
    return Codes(
        store,
        StoredTensor(shape, np.dtype(np.uint8), blocks.source, read),
        StoredTensor(
            of_groups, np.dtype(store.scale_dtype), scales.source, read_scales
        ),
        table=NUMBERS,
    )


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the numbers of blocks `[..., n, 16]` as bfloat16 `[..., n * 32]`.

    They are exact: bfloat16 has the exponents and more than the two bits of
    significand.
    """
    numbers = PAIRS[blocks].reshape(*scales.shape, BLOCK_SIZE)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - EXPONENT_BIAS)
    scaled = numbers * factors[..., None]
    return scaled.reshape(*scales.shape[:-1], -1).astype(ml_dtypes.bfloat16)
