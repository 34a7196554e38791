"""Weights in the formats of bitsandbytes: NF4 and FP4 in blocks, and int8 in rows.

Four bits (Dettmers et al. 2023, "QLoRA"): `weight [out * in / 2, 1]` has two codes per
byte, the first in the upper half; `weight.quant_map [16]` is the value of a code, and
`weight.absmax` the largest weight of each block of consecutive weights. If these are
quantized too, they are codes for `weight.nested_quant_map [256]` times
`weight.nested_absmax`, minus an offset. `weight.quant_state.bitsandbytes__*` is JSON.

Eight bits: `weight [out, in]` in int8 with `SCB [out]`, the largest weight of each row.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from prompt_tuning.checkpoints.quantized import scaled_tensors
from prompt_tuning.checkpoints.quantized.codes import (
    Codes,
    NestedCodes,
    aligned_group,
    integer_codes,
    table_codes,
)
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT
from prompt_tuning.core.quantization.stores import FP4, NF4
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json

STATE = ".quant_state.bitsandbytes__"
SCALES_OF_ROWS = "SCB"
LARGEST_INT8 = 127
Numbers = Callable[[slice], np.ndarray]
"""Reads a part of the numbers of a tensor."""


def read_bitsandbytes(
    stored: Mapping[str, StoredTensor], _: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with the quantized ones as float32 `[out, in]`.

    Raises:
      InputError: for codes without their scales, or with the wrong size.
    """
    result = dict(stored)
    for name, tensor in stored.items():
        base, state, _kind = name.partition(STATE)
        if state:
            weight = _four_bits(base, stored, tensor)
            for part in [part for part in stored if part.startswith(f"{base}.")]:
                del result[part]
            result[base] = weight
        elif name.endswith(f".{SCALES_OF_ROWS}"):
            module = name.removesuffix(SCALES_OF_ROWS)
            weight = _needed(f"{module}weight", stored, tensor)
            result[f"{module}weight"] = scaled_tensors.scaled(
                weight,
                scaled_tensors.as_matrix(tensor, (weight.shape[0], 1)),
                (1, weight.shape[1]),
                factor=1 / LARGEST_INT8,
                encode=functools.partial(integer_codes, 8, -128, weight, None),
            )
            del result[name]
            result.pop(f"{module}weight_format", None)
    return result


def _needed(
    name: str, stored: Mapping[str, StoredTensor], beside: StoredTensor
) -> StoredTensor:
    if name not in stored:
        raise InputError(f"{beside.source} has quantized weights, but no {name}")
    return stored[name]


def _four_bits(
    name: str, stored: Mapping[str, StoredTensor], state: StoredTensor
) -> StoredTensor:
    """Returns a weight `[out, in]` that is stored in blocks of four bits."""
    source = f"{state.source}, {name}"
    settings = as_object(parse_json(state.read().tobytes(), source), source)
    shape = settings.integers("shape")
    size = settings.integer("blocksize", minimum=1)
    codes = _needed(name, stored, state)
    table = _needed(f"{name}.quant_map", stored, state).read().astype(np.float32)
    largest = _needed(f"{name}.absmax", stored, state)
    if len(shape) != 2:
        settings.refuse("shape", "a matrix")
    rows, columns = shape
    count = rows * columns
    if (
        codes.dtype != np.uint8
        or codes.size != -(-count // 2)
        or table.shape != (16,)
        or largest.size != -(-count // size)
    ):
        raise InputError(
            f"{source} has {codes.size:,} codes of {codes.dtype.name}, {table.size} "
            f"values and {largest.size:,} scales for shape {tuple(shape)} in blocks "
            f"of {size}, expected {-(-count // 2):,} of uint8, 16 and "
            f"{-(-count // size):,}"
        )
    scales = _scales(name, stored, largest, settings)
    packed = _flat(codes)

    def read_codes(block: Block) -> np.ndarray:
        row, column = block
        part = slice(row.start * columns, row.stop * columns)
        pairs = packed(blocks_of(part, 2))
        both = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)
        some = both[place_in_blocks(part, 2)]
        return some.reshape(-1, columns)[:, column]

    values = StoredTensor((rows, columns), codes.dtype, codes.source, read_codes)

    def read(block: Block) -> np.ndarray:
        row, column = block
        part = slice(row.start * columns, row.stop * columns)
        wide = table[values.read((row, slice(0, columns)))].reshape(-1)
        wide *= scaled_tensors.stretched(scales(blocks_of(part, size)), part, size)
        return wide.reshape(-1, columns)[:, column]

    group = aligned_group(columns, size)
    if group is None:
        return scaled_tensors.computed(codes, (rows, columns), read)
    kind = NF4 if np.array_equal(table, NORMAL_FLOAT) else FP4
    of_rows = _scales_of_rows(scales, largest.source, (rows, columns), size, group)
    held = table_codes(kind, values, table, of_rows)
    if held is not None and largest.dtype == np.uint8:
        held = _with_nested(held, name, stored, settings)
    return scaled_tensors.computed(codes, (rows, columns), read, held)


def _with_nested(
    held: Codes, name: str, stored: Mapping[str, StoredTensor], settings: JsonObject
) -> Codes:
    """Returns a weight's codes with those of its scales, if a store has them."""
    rows, columns = held.values.shape
    inner, outer = stored[f"{name}.absmax"], stored[f"{name}.nested_absmax"]
    size = settings.integer("blocksize")
    wide = size * settings.integer("nested_blocksize")
    span, group = aligned_group(columns, wide), held.store.group
    if span is None or group is None or span % group:
        return held
    offset = np.float32(settings.number("nested_offset"))
    values = stored[f"{name}.nested_quant_map"].read().reshape(-1)
    shape, source = (rows, columns), inner.source
    nested = NestedCodes(
        _scales_of_rows(_flat(inner), source, shape, size, group, np.uint8),
        _scales_of_rows(_flat(outer), source, shape, wide, span),
        np.append(values, offset).astype(np.float32),
    )
    store = dataclasses.replace(held.store, nested=span // group)
    return dataclasses.replace(held, store=store, nested=nested)


def _scales_of_rows(
    scales: Numbers,
    source: str,
    shape: tuple[int, int],
    size: int,
    group: int,
    dtype: type = np.float32,
) -> StoredTensor:
    """Returns scales of consecutive blocks as scales of groups.

    A block has `size` weights; each group, of `group` weights, is within one block.
    """
    rows, columns = shape

    def read(part: Block) -> np.ndarray:
        row, groups = part
        blocks = blocks_of(slice(row.start * columns, row.stop * columns), size)
        starts = np.arange(row.start, row.stop)[:, None] * columns
        of_groups = starts + np.arange(groups.start, groups.stop) * group
        return scales(blocks)[of_groups // size - blocks.start]

    return StoredTensor((rows, columns // group), np.dtype(dtype), source, read)


def _flat(tensor: StoredTensor) -> Numbers:
    """Returns a function that reads a part of a tensor with one long axis."""
    axis = int(np.argmax(tensor.shape))

    def read(part: slice) -> np.ndarray:
        block = [slice(0, 1)] * len(tensor.shape)
        block[axis] = part
        return tensor.read(tuple(block)).reshape(-1)

    return read


def _scales(
    name: str,
    stored: Mapping[str, StoredTensor],
    largest: StoredTensor,
    settings: JsonObject,
) -> Numbers:
    """Returns a function that reads the scales of blocks, which may be quantized."""
    codes = _flat(largest)
    if largest.dtype != np.uint8:
        return lambda part: codes(part).astype(np.float32)
    table = _needed(f"{name}.nested_quant_map", stored, largest).read()
    outer = _needed(f"{name}.nested_absmax", stored, largest)
    size = settings.integer("nested_blocksize", minimum=1)
    offset = np.float32(settings.number("nested_offset"))
    if table.size != 256 or outer.size != -(-largest.size // size):
        raise InputError(
            f"{largest.source}, {name}: {table.size} values and {outer.size} scales of "
            f"scales, expected 256 and {-(-largest.size // size)}"
        )
    values, factors = table.astype(np.float32).reshape(-1), _flat(outer)

    def read(part: slice) -> np.ndarray:
        some = factors(blocks_of(part, size)).astype(np.float32)
        return values[codes(part)] * scaled_tensors.stretched(some, part, size) + offset

    return read
