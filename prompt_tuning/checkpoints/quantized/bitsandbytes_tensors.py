"""Weights in the formats of bitsandbytes: NF4 and FP4 in blocks, and int8 in rows.

Four bits (Dettmers et al. 2023, "QLoRA"): `weight [out * in / 2, 1]` has two codes in
each byte, the first in the upper half; `weight.quant_map [16]` is the value of a code,
and `weight.absmax` the largest weight of each block of consecutive weights. If those
are quantized too, they are codes for `weight.nested_quant_map [256]` times
`weight.nested_absmax`, less an offset. `weight.quant_state.bitsandbytes__*` is JSON.

Eight bits: `weight [out, in]` in int8 with `SCB [out]`, the largest weight of each row.
"""

from collections.abc import Callable, Mapping

import numpy as np

from prompt_tuning.checkpoints.quantized.scaled_tensors import (
    as_matrix,
    computed,
    scaled,
)
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json

STATE = ".quant_state.bitsandbytes__"
SCALES_OF_ROWS = "SCB"
LARGEST_INT8 = 127


def read_bitsandbytes(
    stored: Mapping[str, StoredTensor], _: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with the quantized ones as float32 `[out, in]`.

    Raises:
      InputError: for codes without their scales, or of another size.
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
            rows = as_matrix(tensor, (weight.shape[0], 1))
            block = (1, weight.shape[1])
            result[f"{module}weight"] = scaled(
                weight, rows, block, factor=1 / LARGEST_INT8
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
    flat = _as_bytes(codes)

    def read(block: Block) -> np.ndarray:
        row, column = block
        first, last = row.start * columns, row.stop * columns
        packed = flat(first // 2, -(-last // 2))
        both = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
        values = table[both[first % 2 :][: last - first]]
        start = first // size
        factors = scales[start : -(-last // size)].repeat(size)
        values *= factors[first - start * size :][: last - first]
        return values.reshape(-1, columns)[:, column]

    return computed(codes, (rows, columns), read)


def _as_bytes(codes: StoredTensor) -> Callable[[int, int], np.ndarray]:
    """Returns a function that reads a range of a tensor with one long axis."""
    axis = int(np.argmax(codes.shape))

    def read(start: int, stop: int) -> np.ndarray:
        block = [slice(0, 1)] * len(codes.shape)
        block[axis] = slice(start, stop)
        return codes.read(tuple(block)).reshape(-1)

    return read


def _scales(
    name: str,
    stored: Mapping[str, StoredTensor],
    largest: StoredTensor,
    settings: JsonObject,
) -> np.ndarray:
    """Returns the scale of each block, which may be quantized itself."""
    if largest.dtype != np.uint8:
        return largest.read().astype(np.float32).reshape(-1)
    table = _needed(f"{name}.nested_quant_map", stored, largest).read()
    outer = _needed(f"{name}.nested_absmax", stored, largest).read()
    size = settings.integer("nested_blocksize", minimum=1)
    offset = np.float32(settings.number("nested_offset"))
    if table.size != 256 or outer.size != -(-largest.size // size):
        raise InputError(
            f"{largest.source}, {name}: {table.size} values and {outer.size} scales of "
            f"scales, expected 256 and {-(-largest.size // size)}"
        )
    inner = table.astype(np.float32).reshape(-1)[largest.read().reshape(-1)]
    factors = outer.astype(np.float32).reshape(-1).repeat(size)[: largest.size]
    return inner * factors + offset
