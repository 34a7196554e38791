"""Tensors of GGUF files (llama.cpp), mapped into memory.

Quantized tensors are read as float32, or as the stored integers and scales; only the
blocks with the requested elements are read and computed.

A block has the elements of a row in groups, each with a scale, and possibly an offset
that is added or subtracted; a "K" block of 256 elements also scales the scales
(ggml-quants.c and ggml-common.h of llama.cpp). The operations are in ggml's order, so
the numbers are bit-identical to ggml's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, Integer, UInt8

from prompt_tuning.checkpoints.quantized import codes
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, extent, place_in_blocks
from prompt_tuning.core.gguf_files import GgufFile, GgufTensor

PIECE = 2**16
"""Number of elements that are computed at once, so that the steps stay in the cache."""

Blocks = UInt8[np.ndarray, "blocks bytes"]
Numbers = Float32[np.ndarray, "blocks size"]
Scaled = tuple[Int8[np.ndarray, "blocks size"], Float32[np.ndarray, "blocks groups"]]
"""Integers, and the scale of each group of them."""

LEVELS = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
"""The integers that codes of IQ4 stand for."""
K_SIZE = 256
"""Number of elements of a K block."""


def _half(blocks: Blocks, begin: int) -> Float32[np.ndarray, "blocks 1"]:
    """Returns the float16 at an offset in each block."""
    return blocks[:, begin : begin + 2].copy().view("<f2").astype(np.float32)


def _bits(
    packed: Blocks, shifts: range, mask: int, run: int
) -> UInt8[np.ndarray, "blocks _"]:
    """Unpacks runs of bytes: the lowest bits of all bytes of a run come first."""
    parts = packed.reshape(len(packed), -1, 1, run)
    steps = np.asarray(shifts, np.uint8)[:, None]
    return (parts >> steps & np.uint8(mask)).reshape(len(packed), -1)


def _fifth_bits(blocks: Blocks, begin: int) -> UInt8[np.ndarray, "blocks 32"]:
    """Returns a bit for each element from the 32 at an offset, the lowest first."""
    return np.unpackbits(blocks[:, begin : begin + 4], 1, bitorder="little")


def _grouped(
    numbers: Integer[np.ndarray, "blocks size"], groups: int
) -> Float32[np.ndarray, "blocks groups _"]:
    return numbers.reshape(len(numbers), groups, -1).astype(np.float32)


def _q4_0(blocks: Blocks) -> Scaled:
    codes = _bits(blocks[:, 2:], range(0, 8, 4), 15, 16).astype(np.int8) - np.int8(8)
    return codes, _half(blocks, 0)


def _q4_1(blocks: Blocks) -> Numbers:
    codes = _bits(blocks[:, 4:], range(0, 8, 4), 15, 16).astype(np.float32)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> Scaled:
    codes = _bits(blocks[:, 6:], range(0, 8, 4), 15, 16) | _fifth_bits(blocks, 2) << 4
    return codes.astype(np.int8) - np.int8(16), _half(blocks, 0)


def _q5_1(blocks: Blocks) -> Numbers:
    codes = _bits(blocks[:, 8:], range(0, 8, 4), 15, 16) | _fifth_bits(blocks, 4) << 4
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Scaled:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0)


def _q2_k(blocks: Blocks) -> Numbers:
    scales, codes = blocks[:, :16], blocks[:, 16:80]
    factor = _half(blocks, 80) * (scales & 15).astype(np.float32)
    offset = _half(blocks, 82) * (scales >> 4).astype(np.float32)
    values = _grouped(_bits(codes, range(0, 8, 2), 3, 32), 16)
    return (factor[..., None] * values - offset[..., None]).reshape(-1, K_SIZE)


def _q3_k(blocks: Blocks) -> Scaled:
    # The third bit is in the first 32 bytes; where it is 0, 4 is subtracted.
    high = _bits(blocks[:, :32], range(8), 1, 32).astype(np.int8)
    low = _bits(blocks[:, 32:96], range(0, 8, 2), 3, 32).astype(np.int8)
    upper = _bits(blocks[:, 104:108], range(0, 8, 2), 3, 4)
    scales = _bits(blocks[:, 96:104], range(0, 8, 4), 15, 8) | upper << 4
    signed = (scales.astype(np.int8) - np.int8(32)).astype(np.float32)
    return low + (high - np.int8(1)) * np.int8(4), _half(blocks, 108) * signed


def _six_bit_pairs(
    packed: UInt8[np.ndarray, "blocks 12"],
) -> tuple[UInt8[np.ndarray, "blocks 8"], UInt8[np.ndarray, "blocks 8"]]:
    """Unpacks eight scales and eight offsets of six bits.

    The first four of each are the low six bits of four bytes; the high bits of these
    bytes complete the second four, which are in the last four bytes.
    """
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = [first & 63, rest & 15 | first >> 2 & 48]
    offsets = [second & 63, rest >> 4 | second >> 2 & 48]
    return np.concatenate(scales, 1), np.concatenate(offsets, 1)


def _scaled_twice(blocks: Blocks, codes: UInt8[np.ndarray, "blocks 256"]) -> Numbers:
    scales, offsets = _six_bit_pairs(blocks[:, 4:16])
    factor = _half(blocks, 0) * scales.astype(np.float32)
    offset = _half(blocks, 2) * offsets.astype(np.float32)
    values = factor[..., None] * _grouped(codes, 8) - offset[..., None]
    return values.reshape(-1, K_SIZE)


def _q4_k(blocks: Blocks) -> Numbers:
    return _scaled_twice(blocks, _bits(blocks[:, 16:], range(0, 8, 4), 15, 32))


def _q5_k(blocks: Blocks) -> Numbers:
    high = _bits(blocks[:, 16:48], range(8), 1, 32)
    low = _bits(blocks[:, 48:], range(0, 8, 4), 15, 32)
    return _scaled_twice(blocks, low | high << 4)


def _q6_k(blocks: Blocks) -> Scaled:
    low = _bits(blocks[:, :128], range(0, 8, 4), 15, 64)
    high = _bits(blocks[:, 128:192], range(0, 8, 2), 3, 32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    return codes, _half(blocks, 208) * scales


def _iq4_nl(blocks: Blocks) -> Scaled:
    return LEVELS[_bits(blocks[:, 2:], range(0, 8, 4), 15, 16)], _half(blocks, 0)


def _iq4_xs(blocks: Blocks) -> Scaled:
    upper = _bits(blocks[:, 2:4], range(0, 8, 2), 3, 1)
    lower = _bits(blocks[:, 4:8], range(0, 8, 4), 15, 1)
    scales = (lower | upper << 4).astype(np.int8) - np.int8(32)
    codes = LEVELS[_bits(blocks[:, 8:], range(0, 8, 4), 15, 16)]
    return codes, _half(blocks, 0) * scales.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ScaledIntegers:
    """Blocks of integers that are multiplied by the scales of their groups.

    Attributes:
      bits: size of the smallest signed integers, 4 or 8 bits, that have the values.
      groups: number of groups in a block.
      read: returns the integers and the scales of blocks.
    """

    bits: int
    groups: int
    read: Callable[[Blocks], Scaled]

    def __call__(self, blocks: Blocks) -> Numbers:
        """Returns the numbers of blocks."""
        codes, scales = self.read(blocks)
        numbers = scales[..., None] * _grouped(codes, self.groups)
        return numbers.reshape(len(blocks), -1)


INTEGERS: Mapping[str, ScaledIntegers] = {
    "Q4_0": ScaledIntegers(4, 1, _q4_0),
    "Q5_0": ScaledIntegers(8, 1, _q5_0),
    "Q8_0": ScaledIntegers(8, 1, _q8_0),
    "Q3_K": ScaledIntegers(4, 16, _q3_k),
    "Q6_K": ScaledIntegers(8, 16, _q6_k),
    "IQ4_NL": ScaledIntegers(8, 1, _iq4_nl),
    "IQ4_XS": ScaledIntegers(8, 8, _iq4_xs),
}
"""The types without offsets, by their names."""
DEQUANTIZERS: Mapping[str, Callable[[Blocks], Numbers]] = {
    **INTEGERS,
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
"""Returns the numbers of blocks, by the name of their type."""

FLOATS = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types whose blocks are floats."""


def open_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Opens the tensors of a file without reading them."""
    return {name: _open(file.path, tensor) for name, tensor in file.tensors.items()}


def _open(path: Path, tensor: GgufTensor) -> StoredTensor:
    kind = tensor.type.name
    if kind in FLOATS:
        read = functools.partial(_read_floats, path, tensor, FLOATS[kind])
        return StoredTensor(tensor.shape, FLOATS[kind], str(path), read)
    numbers = _computed(path, tensor, tensor.type.size, DEQUANTIZERS[kind])
    return codes.WidenedTensor(
        numbers.shape,
        numbers.dtype,
        numbers.source,
        numbers.read_block,
        codes=_codes(path, tensor),
    )


def _codes(path: Path, tensor: GgufTensor) -> codes.Codes | None:
    """Returns the integers and scales of matrices; None if they have offsets, too."""
    integers = INTEGERS.get(tensor.type.name)
    if integers is None or len(tensor.shape) not in (2, 3):
        return None
    values = _computed(path, tensor, tensor.type.size, lambda x: integers.read(x)[0])
    scales = _computed(path, tensor, integers.groups, lambda x: integers.read(x)[1])
    lowest = -(2 ** (integers.bits - 1))
    return codes.integer_codes(integers.bits, lowest, values, None, scales)


def _computed(
    path: Path,
    tensor: GgufTensor,
    count: int,
    compute: Callable[[np.ndarray], np.ndarray],
) -> StoredTensor:
    """Returns the tensor of `count` numbers computed from each block.

    `compute` returns the numbers of some blocks, `[blocks, count]`.
    """
    dtype = compute(np.zeros((1, tensor.type.bytes), np.uint8)).dtype
    read = functools.partial(_read_blocks, path, tensor, count, dtype, compute)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // tensor.type.size * count)
    return StoredTensor(shape, dtype, str(path), read)


def _bytes_of(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Maps a tensor's bytes, with the axes of the tensor; the last one in bytes."""
    data = np.memmap(path, np.uint8, "r", tensor.begin, (tensor.end - tensor.begin,))
    return data.reshape(*tensor.shape[:-1], -1)


def _read_floats(
    path: Path, tensor: GgufTensor, dtype: np.dtype, block: Block
) -> np.ndarray:
    return _bytes_of(path, tensor).view(dtype)[block]


def _read_blocks(
    path: Path,
    tensor: GgufTensor,
    count: int,
    dtype: np.dtype,
    compute: Callable[[np.ndarray], np.ndarray],
    block: Block,
) -> np.ndarray:
    *leading, last = block
    width = tensor.type.bytes
    needed = blocks_of(last, count)
    packed = _bytes_of(path, tensor)
    packed = packed[(*leading, slice(needed.start * width, needed.stop * width))]
    columns = (needed.stop - needed.start) * count
    rows = math.prod(packed.shape[:-1])
    if not rows or not columns:
        return np.empty(extent(block), dtype)
    packed = packed.reshape(rows, packed.shape[-1])
    result = np.empty((rows, last.stop - last.start), dtype)
    step = max(1, PIECE * width // (packed.shape[1] * tensor.type.size))
    for row in range(0, rows, step):
        some = np.ascontiguousarray(packed[row : row + step]).reshape(-1, width)
        numbers = compute(some).reshape(-1, columns)
        result[row : row + step] = numbers[:, place_in_blocks(last, count)]
    return result.reshape(extent(block))
