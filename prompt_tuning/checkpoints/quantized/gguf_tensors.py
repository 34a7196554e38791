"""Tensors of GGUF files (llama.cpp), mapped into memory.

Quantized tensors are read as float32, or as the stored integers and scales; only the
blocks with the requested elements are read and computed.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prompt_tuning.checkpoints.quantized import codes
from prompt_tuning.checkpoints.quantized.gguf_blocks import (
    DEQUANTIZERS,
    FLOATS,
    INTEGERS,
)
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, extent
from prompt_tuning.core.gguf_files import GgufFile, GgufTensor

PIECE = 2**16
"""Number of elements that are computed at once, so that the steps stay in the cache."""


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
    skipped = last.start - needed.start * count
    rows = math.prod(packed.shape[:-1])
    if not rows or not columns:
        return np.empty(extent(block), dtype)
    packed = packed.reshape(rows, packed.shape[-1])
    result = np.empty((rows, last.stop - last.start), dtype)
    step = max(1, PIECE * width // (packed.shape[1] * tensor.type.size))
    for row in range(0, rows, step):
        some = np.ascontiguousarray(packed[row : row + step]).reshape(-1, width)
        numbers = compute(some).reshape(-1, columns)
        result[row : row + step] = numbers[:, skipped : skipped + result.shape[1]]
    return result.reshape(extent(block))
