"""Weights in the formats of GPTQ and AWQ: integers in groups of the inputs.

Both store `scales [in / group, out]`, `qweight` and `qzeros` in words of 32 bits, and
mean `(q - z) s`. GPTQ packs `qweight [in / 8, out]` along the inputs, and its first
version stores `z - 1`; `g_idx [in]` is the group of each input. AWQ packs `qweight [in,
out / 8]` along the outputs, in its own order.
"""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from prompt_tuning.checkpoints.quantized.codes import in_order_of_groups, integer_codes
from prompt_tuning.checkpoints.quantized.scaled_tensors import (
    computed,
    naming,
    refuse_both,
    scaled,
    unpacked,
)
from prompt_tuning.checkpoints.rearranged import turned
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject

WORDS = "qweight"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word of each of eight outputs."""


def read_gptq(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with GPTQ's as float32 `[out, in]`.

    Raises:
      InputError: for tensors that are missing or have the wrong size.
    """
    bits = settings.integer("bits")
    if bits not in (2, 3, 4, 8):
        settings.refuse("bits", "2, 3, 4 or 8")
    shift = 0 if settings.text("checkpoint_format", "gptq") == "gptq_v2" else 1
    result = dict(stored)
    for module, words, zeros, scales in _modules(stored, result):
        groups = stored.get(f"{module}g_idx")
        order = None if groups is None else groups.read()
        result.pop(f"{module}g_idx", None)
        with naming(f"{module}weight"):
            values = unpacked(turned(words), bits)  # [out, in]
            points = turned(unpacked(zeros, bits, offset=shift))  # [out, groups]
            _check_groups(values, scales, settings)
            result[f"{module}weight"] = by_group(
                values, turned(scales), points, order, bits
            )
    return result


def read_awq(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors, with AWQ's as float32 `[out, in]`.

    Raises:
      InputError: for tensors that are missing or have the wrong size.
    """
    if settings.integer("bits") != 4:
        settings.refuse("bits", "4")
    if settings.text("version", "gemm").lower() != "gemm":
        settings.refuse("version", "'gemm'")
    result = dict(stored)
    for module, words, zeros, scales in _modules(stored, result):
        with naming(f"{module}weight"):
            values = turned(unpacked(words, 4, order=AWQ_ORDER))
            points = turned(unpacked(zeros, 4, order=AWQ_ORDER))
            _check_groups(values, scales, settings)
            result[f"{module}weight"] = by_group(
                values, turned(scales), points, None, 4
            )
    return result


def _modules(
    stored: Mapping[str, StoredTensor], result: dict[str, StoredTensor]
) -> list[tuple[str, StoredTensor, StoredTensor, StoredTensor]]:
    """Takes the three tensors of each quantized projection out of the result."""
    modules = []
    for name in stored:
        module = name.removesuffix(WORDS)
        if module == name:
            continue
        names = [f"{module}{part}" for part in (WORDS, "qzeros", "scales")]
        missing = [tensor_name for tensor_name in names if tensor_name not in stored]
        if missing:
            raise InputError(
                f"{stored[name].source} has {name}, but no {' and no '.join(missing)}"
            )
        refuse_both(stored, f"{module}weight", name)
        for tensor_name in names:
            del result[tensor_name]
        words, zeros, scales = (stored[tensor_name] for tensor_name in names)
        modules.append((module, words, zeros, scales))
    return modules


def _check_groups(
    values: StoredTensor, scales: StoredTensor, settings: JsonObject
) -> None:
    """Checks the size of groups, if given; -1 means whole columns."""
    size_in = values.shape[1]
    size = settings.integer("group_size", 0, minimum=-1)
    expected = 1 if size == -1 else -(-size_in // size) if size else scales.shape[0]
    if scales.shape[0] != expected:
        raise InputError(
            f"{scales.source} has scales of shape {scales.shape}, but group_size in "
            f"{settings.source} is {size}, which makes {expected} of {size_in} inputs"
        )


def by_group(
    values: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor | None,
    order: np.ndarray | None,
    bits: int,
    lowest: int = 0,
) -> StoredTensor:
    """Returns weights that mean `(q - z) s`, each input with its group's `z` and `s`.

    Args:
      values: integers `q`, `[out, in]`.
      scales: `s`, `[out, groups]`.
      zeros: `z`, `[out, groups]` or wider; None for 0.
      order: number of the group of each input, `[in]`; None if they are in order.
      bits: bits of an integer.
      lowest: smallest value of an integer.

    Raises:
      InputError: for sizes that do not match.
    """
    size_in, count = values.shape[1], scales.shape[1]
    if count == 0 or size_in % count or scales.shape[0] != values.shape[0]:
        raise InputError(
            f"{scales.source} has scales of shape {scales.shape[::-1]} for weights of "
            f"shape {values.shape[::-1]}, expected some for each output"
        )
    # Packed zero points may fill words that no scale needs.
    points = None if zeros is None else dataclasses.replace(zeros, shape=scales.shape)
    step = size_in // count
    if order is None or np.array_equal(order, np.arange(size_in) // step):
        encode = functools.partial(integer_codes, bits, lowest, values, points)
        return scaled(values, scales, (1, step), zeros=points, encode=encode)
    if len(order) != size_in or order.min() < 0 or order.max() >= count:
        raise InputError(
            f"{values.source} has a g_idx of {len(order):,} inputs up to group "
            f"{order.max()}, expected {size_in:,} and groups below {count}"
        )

    def read(block: Block) -> np.ndarray:
        rows, columns = block
        groups = order[columns]
        around = (rows, slice(0, count))
        wide = values.read(block).astype(np.float32)
        if points is not None:
            wide -= points.read(around).astype(np.float32)[:, groups]
        wide *= scales.read(around).astype(np.float32)[:, groups]
        return wide

    codes = in_order_of_groups(
        order,
        values,
        lambda ordered: integer_codes(bits, lowest, ordered, points, scales),
    )
    return computed(values, (values.shape[0], size_in), read, codes)
