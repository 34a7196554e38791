"""Tensors whose elements are those of another in another order, or with an offset."""

import dataclasses

import numpy as np
from jaxtyping import Int

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block


def reordered(tensor: StoredTensor, order: Int[np.ndarray, "rows"]) -> StoredTensor:
    """Returns a tensor with the rows of another in a given order.

    A block is read with all rows of the other that lie between its own.
    """

    def read(block: Block) -> np.ndarray:
        rows, *others = block
        needed = order[rows]
        if not len(needed):
            return tensor.read((slice(0, 0), *others))
        first, last = int(needed.min()), int(needed.max())
        return tensor.read((slice(first, last + 1), *others))[needed - first]

    return dataclasses.replace(tensor, read_block=read, pieces=None)


def shifted(tensor: StoredTensor, number: float) -> StoredTensor:
    """Returns a tensor with a number added to each element, as float32."""

    def read(block: Block) -> np.ndarray:
        return tensor.read(block).astype(np.float32) + np.float32(number)

    return dataclasses.replace(tensor, dtype=np.dtype(np.float32), read_block=read)


def stacked_part(tensor: StoredTensor, index: int) -> StoredTensor:
    """Returns one of the arrays that a tensor stacks on its first axis."""

    def read(block: Block) -> np.ndarray:
        return tensor.read((slice(index, index + 1), *block))[0]

    return StoredTensor(tensor.shape[1:], tensor.dtype, tensor.source, read)


def as_row(tensor: StoredTensor) -> StoredTensor:
    """Returns a vector as a matrix of one row."""

    def read(block: Block) -> np.ndarray:
        rows, columns = block
        return tensor.read((columns,))[None][rows]

    return StoredTensor((1, *tensor.shape), tensor.dtype, tensor.source, read)
