"""Tensors made from others by reordering elements or adding an offset.

The codes of quantized tensors are rearranged, too, if their inputs stay in place.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from prompt_tuning.checkpoints.quantized.codes import WidenedTensor
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block


def reordered(tensor: StoredTensor, order: Int[np.ndarray, "rows"]) -> StoredTensor:
    """Returns a tensor with another's rows in a new order.

    To read a block, it reads all of the other's rows between those it needs.
    """

    def read(block: Block) -> np.ndarray:
        rows, *columns = block
        needed = order[rows]
        if not len(needed):
            return tensor.read((slice(0, 0), *columns))
        first, last = int(needed.min()), int(needed.max())
        return tensor.read((slice(first, last + 1), *columns))[needed - first]

    changed = dataclasses.replace(tensor, read_block=read, pieces=None)
    if not isinstance(changed, WidenedTensor) or changed.codes is None:
        return changed
    codes = changed.codes.changed(lambda part: reordered(part, order))
    return dataclasses.replace(changed, codes=codes)


def turned(tensor: StoredTensor) -> StoredTensor:
    """Returns the transpose of a matrix."""

    def read(block: Block) -> np.ndarray:
        return tensor.read(block[::-1]).T

    return _changed(tensor, tensor.shape[::-1], read)


def shifted(tensor: StoredTensor, number: float) -> StoredTensor:
    """Returns a tensor with a number added to each element, as float32."""

    def read(block: Block) -> np.ndarray:
        return tensor.read(block).astype(np.float32) + np.float32(number)

    changed = _changed(tensor, tensor.shape, read)
    return dataclasses.replace(changed, dtype=np.dtype(np.float32))


def stacked_part(tensor: StoredTensor, index: int) -> StoredTensor:
    """Returns one of the arrays stacked on a tensor's first axis."""

    def part(whole: StoredTensor) -> StoredTensor:
        def read(block: Block) -> np.ndarray:
            return whole.read((slice(index, index + 1), *block))[0]

        return _changed(whole, whole.shape[1:], read)

    if not isinstance(tensor, WidenedTensor) or tensor.codes is None:
        return part(tensor)
    return dataclasses.replace(part(tensor), codes=tensor.codes.changed(part))


def as_row(tensor: StoredTensor) -> StoredTensor:
    """Returns a vector as a matrix with one row."""

    def read(block: Block) -> np.ndarray:
        rows, columns = block
        return tensor.read((columns,))[None][rows]

    return _changed(tensor, (1, *tensor.shape), read)


def _changed(
    tensor: StoredTensor, shape: tuple[int, ...], read: Callable[[Block], np.ndarray]
) -> StoredTensor:
    """Returns a tensor of another shape; a quantized one without its codes."""
    changed = dataclasses.replace(tensor, shape=shape, read_block=read, pieces=None)
    if isinstance(changed, WidenedTensor):
        return dataclasses.replace(changed, codes=None)
    return changed
