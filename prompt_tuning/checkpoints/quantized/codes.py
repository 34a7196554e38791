"""Tensors that read as floats, together with their stored codes."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float32, Int32

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.quantization import stores
from prompt_tuning.core.quantization.nibbles import MIDDLE
from prompt_tuning.core.quantization.stores import Store


@dataclasses.dataclass(frozen=True)
class NestedCodes:
    """Scales in codes; see `ScalesInCodes`.

    Attributes:
      values: codes, uint8 `[out, groups]`.
      largest: float32 `[out, groups / n]`.
      table: values of the codes and the offset.
    """

    values: StoredTensor
    largest: StoredTensor
    table: Float32[np.ndarray, "257"]


@dataclasses.dataclass(frozen=True)
class Codes:
    """Codes of a weight `[out, in]`; see `quantization.stores`.

    For experts they have a leading axis, and the axes of their weights.

    Attributes:
      store: store that holds them exactly.
      values: one code per byte, `[out, in]`.
      scales: `[out, groups]`, float32 or the `scale_dtype` of the store.
      zeros: codes that stand for 0, int16 `[out, groups]`; None if in the middle.
      table: values of the 16 codes; None if they are integer multiples.
      order: input of each column; None if they are in order.
      nested: codes of the scales, if these are quantized.
    """

    store: Store
    values: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    table: Float32[np.ndarray, "16"] | None = None
    order: Int32[np.ndarray, "in"] | None = None
    nested: NestedCodes | None = None

    def changed(self, change: Callable[[StoredTensor], StoredTensor]) -> "Codes":
        """Applies a change to each of the tensors."""
        nested = self.nested and dataclasses.replace(
            self.nested,
            values=change(self.nested.values),
            largest=change(self.nested.largest),
        )
        return dataclasses.replace(
            self,
            nested=nested,
            values=change(self.values),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
        )


@dataclasses.dataclass(frozen=True)
class WidenedTensor(StoredTensor):
    """A quantized tensor that reads as floats.

    Attributes:
      codes: the stored codes; None if no kernel store holds them exactly.
    """

    codes: Codes | None = None


def mapped(
    tensor: StoredTensor,
    dtype: type | str,
    function: Callable[[np.ndarray], np.ndarray],
) -> StoredTensor:
    """Returns a tensor with a function applied to each number."""

    def read(block: Block) -> np.ndarray:
        return function(tensor.read(block)).astype(dtype, copy=False)

    return StoredTensor(tensor.shape, np.dtype(dtype), tensor.source, read)


def integer_codes(
    bits: int,
    lowest: int,
    values: StoredTensor,
    zeros: StoredTensor | None,
    scales: StoredTensor,
) -> Codes | None:
    """Returns the codes of integers; None if no store holds them.

    Args:
      bits: bits per integer.
      lowest: lowest possible integer.
      values: the integers, `[out, in]`.
      zeros: integers that stand for 0, `[out, groups]`; None for 0.
      scales: scales, `[out, groups]`.
    """
    packed = bits <= 4
    name, middle = (stores.INT4, MIDDLE) if packed else (stores.INT8, 0)
    # What is added to an integer to make a code of it.
    shift = -lowest if packed else -lowest - 2 ** (bits - 1)
    group = group_of(values.shape[-1], scales.shape[-1])
    if group is None or (packed and group % 2) or (zeros is None and shift != middle):
        return None

    def shifted(integers: np.ndarray) -> np.ndarray:
        return integers + np.int16(shift) if shift else integers

    points = None if zeros is None else mapped(zeros, np.int16, shifted)
    by_column = group == values.shape[-1] and not packed and zeros is None
    dtype = np.uint8 if packed else np.int8
    return Codes(
        Store(name, None if by_column else group, zeros is not None),
        mapped(values, dtype, shifted),
        scales,
        points,
    )


def in_order_of_groups(
    groups: np.ndarray,
    values: StoredTensor,
    encode: Callable[[StoredTensor], Codes | None],
) -> Codes | None:
    """Returns the codes of columns, sorted by group.

    Args:
      groups: group of each column.
      values: one number per column, `[out, in]`.
      encode: returns the codes of the sorted columns.
    """
    if len(set(np.bincount(groups).tolist())) > 1:
        return None  # groups of several sizes
    order = np.argsort(groups, kind="stable").astype(np.int32)

    def read(block: Block) -> np.ndarray:
        rows, columns = block
        chosen = order[columns]
        if not len(chosen):
            return values.read(block)
        first, stop = int(chosen.min()), int(chosen.max()) + 1
        return values.read((rows, slice(first, stop)))[:, chosen - first]

    ordered = StoredTensor(values.shape, values.dtype, values.source, read)
    codes = encode(ordered)
    if codes is None:
        return None
    store = dataclasses.replace(codes.store, ordered=True)
    return dataclasses.replace(codes, store=store, order=order)


def table_codes(
    name: str,
    values: StoredTensor,
    table: Float32[np.ndarray, "16"],
    scales: StoredTensor,
) -> Codes | None:
    """Returns the codes of the values of a table; None if no store holds them.

    Args:
      name: name of the store.
      values: codes from 0 to 15, `[out, in]`.
      table: value of each code.
      scales: scales, `[out, groups]`.
    """
    group = group_of(values.shape[1], scales.shape[1])
    if group is None or group % 2:
        return None
    return Codes(Store(name, group), values, scales, table=table)


def float8_codes(values: StoredTensor, scales: StoredTensor) -> Codes | None:
    """Returns the codes of float8 numbers `[out, in]`; None if no store holds them.

    `scales` are `[out, groups]`.
    """
    group = group_of(values.shape[1], scales.shape[1])
    if group is None or values.dtype.name != stores.FLOAT8:
        return None
    by_column = group == values.shape[1]
    return Codes(Store(stores.FLOAT8, None if by_column else group), values, scales)


def group_of(size_in: int, count: int) -> int | None:
    """Returns the size of equal groups of inputs; None if they are too small."""
    group, rest = divmod(size_in, count)
    return None if rest or (count > 1 and group < stores.SMALLEST_GROUP) else group


def aligned_group(size_in: int, size: int) -> int | None:
    """Returns the largest group of inputs that is always within one block.

    Blocks may begin anywhere in a row unless each row ends with a block. Returns None
    if such groups are too small.
    """
    group = math.gcd(size_in, size)
    return group_of(size_in, size_in // group)
