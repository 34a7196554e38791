"""Blocks of an array, e.g. one device's shard of a parameter."""

import math
from collections.abc import Sequence

Block = tuple[slice, ...]
"""Position of a block in its array: a slice with start and stop for each axis."""

Shape = tuple[int, ...]


def whole(shape: Sequence[int]) -> Block:
    """Returns the block that covers an array."""
    return tuple(slice(0, size) for size in shape)


def extent(block: Block) -> Shape:
    """Returns the shape of a block."""
    return tuple(axis.stop - axis.start for axis in block)


def blocks_of(part: slice, size: int) -> slice:
    """Returns the blocks of length `size` that overlap a part of an axis."""
    return slice(part.start // size, -(-part.stop // size))


def place_in_blocks(part: slice, size: int) -> slice:
    """Returns the place of a part of an axis within the blocks of `blocks_of`."""
    first = part.start % size
    return slice(first, first + part.stop - part.start)


def clipped(block: Sequence[slice], shape: Sequence[int]) -> Block:
    """Clips a block to an array; a block beyond the end becomes empty."""
    return tuple(
        slice(*axis.indices(size)[:2]) for axis, size in zip(block, shape, strict=True)
    )


def relative(block: Block, outer: Block) -> Block:
    """Translates a block to coordinates within a block that contains it."""
    return tuple(
        slice(inner.start - around.start, inner.stop - around.start)
        for inner, around in zip(block, outer, strict=True)
    )


def joined(blocks: Sequence[Block]) -> Block | None:
    """Joins disjoint blocks into the one that they fill; None if they leave gaps."""
    bounds = tuple(
        slice(min(part.start for part in axis), max(part.stop for part in axis))
        for axis in zip(*blocks, strict=True)
    )
    filled = sum(math.prod(extent(block)) for block in blocks)
    return bounds if filled == math.prod(extent(bounds)) else None
