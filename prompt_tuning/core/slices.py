"""Blocks of an array: what a device has of a parameter, and a file of an array."""

import math
from collections.abc import Sequence

Block = tuple[slice, ...]
"""Where a block stands in its array: for each axis a slice with start and stop."""

Shape = tuple[int, ...]


def whole(shape: Sequence[int]) -> Block:
    """The block that is the array."""
    return tuple(slice(0, size) for size in shape)


def extent(block: Block) -> Shape:
    """The shape of a block."""
    return tuple(axis.stop - axis.start for axis in block)


def clipped(block: Sequence[slice], shape: Sequence[int]) -> Block:
    """What of a block lies inside an array; empty where it stands beyond the end."""
    return tuple(
        slice(*axis.indices(size)[:2]) for axis, size in zip(block, shape, strict=True)
    )


def relative(block: Block, outer: Block) -> Block:
    """Where a block stands in another one that holds it."""
    return tuple(
        slice(inner.start - around.start, inner.stop - around.start)
        for inner, around in zip(block, outer, strict=True)
    )


def joined(blocks: Sequence[Block]) -> Block | None:
    """The block that some blocks fill, none twice; None if they leave gaps."""
    around = tuple(
        slice(min(part.start for part in axis), max(part.stop for part in axis))
        for axis in zip(*blocks, strict=True)
    )
    filled = sum(math.prod(extent(block)) for block in blocks)
    return around if filled == math.prod(extent(around)) else None
