"""Tensors of GGUF files (llama.cpp), mapped into memory.

Tensors in integers are read as float32; only the blocks of the wanted elements are
read and computed.
"""

import functools
import math
from pathlib import Path

import numpy as np

from prompt_tuning.checkpoints.formats.gguf_blocks import DEQUANTIZERS, FLOATS
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, extent
from prompt_tuning.core.gguf_files import GgufFile, GgufTensor

PIECE = 2**16
"""Number of elements that are computed at once, so that the steps stay in the cache."""


def open_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Opens the tensors of a file without reading them."""
    stored = {}
    for name, tensor in file.tensors.items():
        dtype = FLOATS.get(tensor.type.name)
        if dtype is None:
            dtype = np.dtype(np.float32)
            read = functools.partial(_read_blocks, file.path, tensor)
        else:
            read = functools.partial(_read_floats, file.path, tensor, dtype)
        stored[name] = StoredTensor(tensor.shape, dtype, str(file.path), read)
    return stored


def _bytes_of(path: Path, tensor: GgufTensor) -> np.ndarray:
    """Maps a tensor's bytes, with the axes of the tensor; the last one in bytes."""
    data = np.memmap(path, np.uint8, "r", tensor.begin, (tensor.end - tensor.begin,))
    return data.reshape(*tensor.shape[:-1], -1)


def _read_floats(
    path: Path, tensor: GgufTensor, dtype: np.dtype, block: Block
) -> np.ndarray:
    return _bytes_of(path, tensor).view(dtype)[block]


def _read_blocks(path: Path, tensor: GgufTensor, block: Block) -> np.ndarray:
    *others, last = block
    size, width = tensor.type.size, tensor.type.bytes
    needed = blocks_of(last, size)
    packed = _bytes_of(path, tensor)
    packed = packed[(*others, slice(needed.start * width, needed.stop * width))]
    columns = (needed.stop - needed.start) * size
    skipped = last.start - needed.start * size
    rows = math.prod(packed.shape[:-1])
    if not rows or not columns:
        return np.empty(extent(block), np.float32)
    packed = packed.reshape(rows, packed.shape[-1])
    result = np.empty((rows, last.stop - last.start), np.float32)
    step = max(1, PIECE // columns)
    dequantize = DEQUANTIZERS[tensor.type.name]
    for row in range(0, rows, step):
        some = np.ascontiguousarray(packed[row : row + step]).reshape(-1, width)
        numbers = dequantize(some).reshape(-1, columns)
        result[row : row + step] = numbers[:, skipped : skipped + result.shape[1]]
    return result.reshape(extent(block))
