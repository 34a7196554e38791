"""Weights in the formats of compressed-tensors, written by llm-compressor and vLLM.

`weight_scale` has one number for the tensor, for each row, or for each group of a row.
Next to it is `weight` in int8 or float8, or `weight_packed [out, words]`: integers of
four or eight bits, stored without a sign, with `weight_shape`; `weight_zero_point` has
the integers that stand for 0, packed along the rows, and `weight_g_idx [in]` the group
of each input, unless they are in order. NVFP4 packs two codes into a byte
of `weight_packed`, and divides its float8 scales by `weight_global_scale`.
"""

import dataclasses
import functools
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.quantized.codes import integer_codes, table_codes
from prompt_tuning.checkpoints.quantized.gptq_tensors import by_group
from prompt_tuning.checkpoints.quantized.mxfp4 import NUMBERS
from prompt_tuning.checkpoints.quantized.scaled_tensors import (
    as_matrix,
    computed,
    naming,
    refuse_both,
    scaled,
    unpacked,
)
from prompt_tuning.checkpoints.rearranged import turned
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, blocks_of, place_in_blocks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.stores import FP4
from prompt_tuning.core.typed_json import JsonObject, as_object

SCALE = "weight_scale"
PARTS = ("packed", "shape", "zero_point", "g_idx", "global_scale")
UNUSED = ("input_scale", "input_zero_point", "input_global_scale")


def read_compressed(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with the compressed ones as float32 `[out, in]`.

    Raises:
      InputError: for tensors that are missing or have the wrong size.
    """
    bits = _bits(settings)
    result = dict(stored)
    for name, scales in stored.items():
        module = name.removesuffix(SCALE)
        if module == name:
            continue
        parts = {p: stored[q] for p in PARTS if (q := f"{module}weight_{p}") in stored}
        weight = stored.get(f"{module}weight")
        if weight is None and "packed" not in parts:
            raise InputError(f"{scales.source} has {name}, but no weight for it")
        for part in (name, *(f"{module}weight_{part}" for part in parts)):
            del result[part]
        for part in UNUSED:
            result.pop(f"{module}{part}", None)
        if "packed" in parts:
            refuse_both(stored, f"{module}weight", f"{module}weight_packed")
        with naming(f"{module}weight"):
            if "global_scale" in parts:
                factor = 1 / single_number(parts["global_scale"])
                wide = nvfp4(parts["packed"], scales, factor)
            elif weight is not None:
                wide = _grouped(weight, scales, *_plain(weight, parts))
            else:
                wide = _packed(parts, scales, bits)
        result[f"{module}weight"] = wide
    return result


def _bits(settings: JsonObject) -> int:
    groups = settings.nested("config_groups", {})
    sizes = {
        as_object(groups.values[name], settings.source)
        .nested("weights")
        .integer("num_bits")
        for name in groups.values
    }
    if len(sizes) > 1:
        settings.refuse("config_groups", "one num_bits for all weights")
    return sizes.pop() if sizes else 4


def _plain(
    weight: StoredTensor, parts: Mapping[str, StoredTensor]
) -> tuple[StoredTensor | None, int | None]:
    """Returns the zero points and the bits of an unpacked weight."""
    # Older versions store zero points of float8, which are all 0.
    is_integer = weight.dtype == np.int8
    return (parts.get("zero_point"), 8) if is_integer else (None, None)


def _grouped(
    values: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor | None,
    bits: int | None,
) -> StoredTensor:
    """Multiplies by scales of the tensor, of rows or of groups in rows.

    `zeros` is None for 0, and `bits` for float8.
    """
    rows, columns = values.shape
    count = scales.size // rows
    grid, block = (rows, count), (1, columns // max(count, 1))
    if scales.size == 1:
        grid, block = (1, 1), (rows, columns)
    elif count == 0 or columns % count:
        raise InputError(
            f"{scales.source} has scales of shape {scales.shape} for weights of shape "
            f"{values.shape}, expected some for each row"
        )
    zeros = None if zeros is None else as_matrix(zeros, grid)
    encode = None
    if bits is not None and (zeros is None or block[0] == 1):
        encode = functools.partial(
            integer_codes, bits, -(2 ** (bits - 1)), values, zeros
        )
    grid_of_scales = as_matrix(scales, grid)
    return scaled(values, grid_of_scales, block, zeros=zeros, encode=encode)


def _packed(
    parts: Mapping[str, StoredTensor], scales: StoredTensor, bits: int
) -> StoredTensor:
    words = parts["packed"]
    if "shape" not in parts:
        raise InputError(f"{words.source} has packed weights without weight_shape")
    rows, columns = (int(size) for size in parts["shape"].read())
    signed = 2 ** (bits - 1)  # integers are stored with this offset
    codes = unpacked(words, bits, offset=-signed)
    if codes.shape[0] != rows or not columns <= codes.shape[1] < columns + 32:
        raise InputError(
            f"{words.source} has packed weights of shape {words.shape}, which does not "
            f"hold {bits} bits for shape ({rows}, {columns})"
        )
    values = dataclasses.replace(codes, shape=(rows, columns))
    zeros = None
    if "zero_point" in parts:
        zeros = turned(unpacked(turned(parts["zero_point"]), bits, offset=-signed))
        zeros = dataclasses.replace(zeros, shape=(rows, zeros.shape[1]))
    order = parts["g_idx"].read() if "g_idx" in parts else None
    # Some files have -1 everywhere for groups in order.
    if order is not None and order.max(initial=-1) >= 0:
        return by_group(values, scales, zeros, order, bits, -signed)
    return _grouped(values, scales, zeros, bits)


def single_number(tensor: StoredTensor) -> float:
    """Returns the number of a tensor that has only one."""
    return float(tensor.read().reshape(-1)[0])


def nvfp4(packed: StoredTensor, scales: StoredTensor, factor: float) -> StoredTensor:
    """Returns weights in e2m1, `[out, in]`, with a float8 scale for every 16 in a row.

    `packed [out, in / 2]` has the even inputs in the low bits; `factor` multiplies all
    weights.

    Raises:
      InputError: for other types.
    """
    rows, half = packed.shape
    if packed.dtype != np.uint8 or scales.dtype != ml_dtypes.float8_e4m3fn:
        raise InputError(
            f"{packed.source} has NVFP4 weights of {packed.dtype.name} with scales of "
            f"{scales.dtype.name}, expected uint8 and float8_e4m3fn"
        )

    def pairs(block: Block) -> np.ndarray:
        row, column = block
        both = packed.read((row, blocks_of(column, 2)))
        codes = np.stack([both & 15, both >> 4], axis=-1).reshape(len(both), -1)
        return codes[:, place_in_blocks(column, 2)]

    columns = 2 * half
    codes = StoredTensor((rows, columns), packed.dtype, packed.source, pairs)
    values = computed(packed, (rows, columns), lambda block: NUMBERS[codes.read(block)])
    return scaled(
        values,
        scales,
        (1, columns // max(scales.shape[1], 1)),
        factor=factor,
        encode=functools.partial(table_codes, FP4, codes, NUMBERS),
    )
