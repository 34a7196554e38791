"""Estimates the memory traffic of a compiled program.

Each instruction reads its operands and writes its result once per run. A fusion is one
instruction; where it reads or writes a slice of an array, only the slice counts. Arrays
that stay in the processor's cache count like others, so that the estimate is an upper
bound of the traffic of main memory.
"""

import math
import re
from typing import NamedTuple

from scripts.bench.hlo import (
    Instruction,
    operation,
    parse,
    result_arrays,
    split_operands,
    walk,
)

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while"),
    *("call", "conditional", "after-all", "partition-id", "iota"),
)
"""Operations that move no data, or whose computations are counted."""

SLICES = ("dynamic-slice", "slice", "gather")
_LAST_NAME = re.compile(r"([\w.$-]+)$")
_CALLS = re.compile(r"\bcalls=%?([\w.$-]+)")


class Traffic(NamedTuple):
    """Bytes that a program reads and writes.

    Attributes:
      products: by matrix products.
      rest: by everything else.
    """

    products: int
    rest: int


def traffic(text: str) -> Traffic:
    """Estimates the traffic of a program's HLO text."""
    computations = parse(text)
    sums = {True: 0, False: 0}
    entry = computations["ENTRY"]
    for instruction in walk(computations, entry, 1, inside_fusions=False):
        if instruction.kind in FREE:
            continue
        called = _CALLS.search(instruction.body)
        fused = computations[called[1]] if called else {}
        is_product = instruction.kind == "dot" or any(
            operation(body)[0] == "dot" for body in fused.values()
        )
        sums[is_product] += instruction.runs * _moved(instruction, fused)
    return Traffic(sums[True], sums[False])


def _moved(instruction: Instruction, fused: dict[str, str]) -> int:
    """Returns the bytes that one run of an instruction reads and writes."""
    operands = _names(instruction.operands)
    sizes = [_size(instruction.computation[name]) for name in operands]
    result = _size(instruction.body)
    if instruction.kind in SLICES:
        return 2 * result
    if instruction.kind == "dynamic-update-slice":
        return 2 * sizes[1]
    if not fused:
        return sum(sizes) + result
    inputs = {
        int(operation(body)[1]): name
        for name, body in fused.items()
        if operation(body)[0] == "parameter"
    }
    reads = sum(_read(fused, inputs[i], size) for i, size in enumerate(sizes))
    updates = [_update(fused, body) for body in fused.values()]
    written = sum(size for size in updates if size is not None)
    return reads + (written or result)


def _read(fused: dict[str, str], name: str, size: int) -> int:
    """Returns the bytes of an array that a fusion reads: all of it, or its slices."""
    total = 0
    for user, body in fused.items():
        kind, operands = operation(body)
        names = _names(operands)
        if name not in names:
            continue
        if kind == "bitcast":
            total += _read(fused, user, size)
        elif kind in SLICES and names[0] == name:
            total += _size(body)
        elif kind != "dynamic-update-slice" or names[0] != name:
            return size
    return min(total, size)


def _update(fused: dict[str, str], body: str) -> int | None:
    """Returns the bytes that a dynamic-update-slice writes, None for other kinds."""
    kind, operands = operation(body)
    if kind != "dynamic-update-slice":
        return None
    return _size(fused[_names(operands)[1]])


def _names(operands: str) -> list[str]:
    """Returns the names of operands, which may follow their types."""
    ends = (_LAST_NAME.search(part.strip()) for part in split_operands(operands))
    return [end[1] for end in ends if end is not None]


def _size(body: str) -> int:
    """Returns the bytes of an instruction's result, of all arrays of a tuple."""
    return sum(BYTES[dtype] * math.prod(shape) for dtype, shape in result_arrays(body))
