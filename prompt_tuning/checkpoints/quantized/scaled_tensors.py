"""Tensors that are computed when they are read: integers times scales."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from prompt_tuning.checkpoints.quantized.codes import (
    Codes,
    WidenedTensor,
    aligned_group,
    float8_codes,
    mapped,
)
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, place_in_blocks
from prompt_tuning.core.errors import InputError

WORD_BITS, BYTE_BITS = 32, 8
Encoder = Callable[[StoredTensor], Codes | None]


@contextlib.contextmanager
def naming(weight: str) -> Iterator[None]:
    """Adds the name of a weight to the beginning of errors."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{weight}: {error}") from error


def refuse_both(
    stored: Mapping[str, StoredTensor], weight: str, quantized: str
) -> None:
    """Refuses a weight that is stored both unquantized and quantized."""
    if weight in stored:
        raise InputError(
            f"{stored[weight].source} has {weight}, and {stored[quantized].source} has "
            f"{quantized} for the same projection; expected one of them: which one "
            "does the model use?"
        )


def scaled(
    values: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int],
    *,
    zeros: StoredTensor | None = None,
    factor: float = 1,
    encode: Encoder | None = None,
) -> WidenedTensor:
    """Returns `(values - zeros) * scales * factor` as float32 `[out, in]`.

    Args:
      values: integers or narrow floats `[out, in]`.
      scales: one number per block, `[out / block[0], in / block[1]]` rounded up.
      block: numbers of rows and columns that share a scale.
      zeros: values that stand for 0, one per block; None for 0.
      factor: multiplies all scales.
      encode: returns the codes of the values, given their scales for groups in each
        row; None for values in float8, or without codes.

    Raises:
      InputError: if the number of scales or zeros does not match.
    """
    expected = tuple(
        -(-size // step) for size, step in zip(values.shape, block, strict=True)
    )
    for name, tensor in (("scales", scales), ("zero points", zeros)):
        if tensor is not None and tensor.shape != expected:
            raise InputError(
                f"{tensor.source} has {name} of shape {tensor.shape} for weights of "
                f"shape {values.shape}, expected {expected}"
            )

    def read(part: Block) -> np.ndarray:
        rows, columns = part
        around = blocks_of(rows, block[0]), blocks_of(columns, block[1])

        def spread(tensor: StoredTensor) -> np.ndarray:
            array = tensor.read(around).astype(np.float32)
            return stretched(stretched(array, rows, block[0]).T, columns, block[1]).T

        wide = values.read(part).astype(np.float32)
        if zeros is not None:
            wide -= spread(zeros)
        wide *= spread(scales) * np.float32(factor)
        return wide

    factors = mapped(scales, np.float32, lambda x: x.astype(np.float32) * factor)
    of_rows = scales_of_rows(factors, values.shape, block)
    encode = encode or functools.partial(float8_codes, values)
    codes = None if of_rows is None else encode(of_rows)
    return computed(values, values.shape, read, codes)


def scales_of_rows(
    scales: StoredTensor, shape: tuple[int, ...], block: tuple[int, int]
) -> StoredTensor | None:
    """Returns scales of blocks as scales of groups in each row, `[out, groups]`.

    Returns None if the groups are too small.
    """
    rows, columns = shape
    height, width = block
    group = aligned_group(columns, min(width, columns))
    if group is None:
        return None
    if height == 1 and group == width:
        return scales

    def read(part: Block) -> np.ndarray:
        row, groups = part
        around = blocks_of(row, height)
        needed = blocks_of(slice(groups.start * group, groups.stop * group), width)
        some = scales.read((around, needed))
        chosen = np.arange(groups.start, groups.stop) * group // width - needed.start
        return stretched(some, row, height)[:, chosen]

    return StoredTensor((rows, columns // group), scales.dtype, scales.source, read)


def stretched(numbers: np.ndarray, part: slice, size: int) -> np.ndarray:
    """Repeats each block's number for its elements in a part of the first axis.

    `numbers` are those of `blocks_of(part, size)`, for blocks of `size` elements.
    """
    return numbers.repeat(size, 0)[place_in_blocks(part, size)]


def as_matrix(tensor: StoredTensor, shape: tuple[int, int]) -> StoredTensor:
    """Reshapes a small tensor to a matrix.

    Raises:
      InputError: if it does not have as many numbers.
    """
    if tensor.size != shape[0] * shape[1]:
        raise InputError(
            f"{tensor.source} has {tensor.size:,} numbers in a tensor of shape "
            f"{tensor.shape}, expected {shape}"
        )

    def read(block: Block) -> np.ndarray:
        return tensor.read().reshape(shape)[block]

    return StoredTensor(shape, tensor.dtype, tensor.source, read)


def unpacked(
    words: StoredTensor,
    bits: int,
    *,
    order: tuple[int, ...] | None = None,
    offset: int = 0,
) -> StoredTensor:
    """Returns the integers in 32-bit words `[rows, words]`; int16 with an offset.

    Args:
      words: the words; consecutive columns are in one word, the first in its lowest
        bits. 32 integers of three bits take three words.
      bits: size of each integer, a divisor of 8, or 3.
      order: position of each column within a word, if not its index.
      offset: added to every integer.

    Raises:
      InputError: for a tensor without words, or integers that do not fill one.
    """
    if words.dtype not in (np.int32, np.uint32) or len(words.shape) != 2:
        raise InputError(
            f"{words.source} has packed weights of {words.dtype.name} and shape "
            f"{words.shape}, expected a matrix of int32"
        )
    unit = 1 if BYTE_BITS % bits == 0 else bits  # words that integers fill
    if bits > BYTE_BITS or words.shape[1] % unit:
        raise InputError(
            f"{words.source}: weights of {bits} bits do not fill words of shape "
            f"{words.shape}"
        )
    count = WORD_BITS * unit // bits

    def read(block: Block) -> np.ndarray:
        rows, columns = block
        needed = blocks_of(columns, count)
        packed = words.read((rows, slice(needed.start * unit, needed.stop * unit)))
        codes = _fields(np.ascontiguousarray(packed), bits)
        if order is not None:
            codes = codes.reshape(len(packed), -1, count)[..., list(order)]
            codes = codes.reshape(len(packed), -1)
        some = codes[:, place_in_blocks(columns, count)]
        return some + np.int16(offset) if offset else some

    shape = (words.shape[0], words.shape[1] // unit * count)
    dtype = np.dtype(np.int16 if offset else np.uint8)
    return StoredTensor(shape, dtype, words.source, read)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the integers in words `[rows, words]` as uint8, the lowest bits first."""
    parts = words.view(np.uint8)  # a word begins with its lowest byte
    if BYTE_BITS % bits:
        single = np.unpackbits(parts, axis=1, bitorder="little")
        grouped = single.reshape(len(parts), -1, bits)
        return np.packbits(grouped, axis=2, bitorder="little")[..., 0]
    count = BYTE_BITS // bits
    codes = np.empty((len(parts), parts.shape[1] * count), np.uint8)
    for i in range(count):
        codes[:, i::count] = parts >> (bits * i) & (2**bits - 1)
    return codes


def computed(
    like: StoredTensor,
    shape: tuple[int, ...],
    read: Callable[[Block], np.ndarray],
    codes: Codes | None = None,
) -> WidenedTensor:
    """Returns a float32 tensor from the file of another."""
    dtype = np.dtype(np.float32)
    return WidenedTensor(shape, dtype, like.source, read, codes=codes)
