"""One array per block instead of a stack of all blocks, to avoid copies.

A loop over stacked blocks copies each block's slice before a product reads it. If the
product has few rows, as in a step of generation, the copies take as long as the
products. With one array per block, a program runs the blocks one by one and copies
nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Shaped

ALIGNMENT = 64
"""Bytes to which the start of an array in the host's memory must be aligned."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockArrays:
    """One array for each block, all with the same shape.

    Attributes:
      blocks: the arrays.
      empty: their shape and dtype, if there are no blocks.
    """

    blocks: tuple[Array, ...]
    empty: jax.ShapeDtypeStruct | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "BlockArrays":
        """Returns zeros; `shape` begins with the number of blocks."""
        if not shape[0]:
            return cls((), jax.ShapeDtypeStruct(shape[1:], dtype))
        return cls(tuple(jnp.zeros(shape[1:], dtype) for _ in range(shape[0])))

    @classmethod
    def of(cls, stack: Shaped[Array, "L ..."]) -> "BlockArrays":
        """Returns the entries of a stack."""
        one = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
        return cls(tuple(stack), None if len(stack) else one)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, block: int) -> Array:
        return self.blocks[block]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stack of all arrays."""
        return (len(self), *self._one.shape)

    @property
    def _one(self) -> Array | jax.ShapeDtypeStruct:
        return self.blocks[0] if self.empty is None else self.empty

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(block.nbytes for block in self.blocks)

    def stacked(self) -> Shaped[Array, "L ..."]:
        """Stacks the arrays."""
        # XLA writes into an array twice as fast as it concatenates on CPUs.
        stack = jnp.zeros(self.shape, self._one.dtype)
        for i, block in enumerate(self.blocks):
            stack = stack.at[i].set(block)
        return stack

    def map(self, function: Callable[..., Array], *others: Any) -> "BlockArrays":
        """Applies a function to each array, along with the entries of other stacks."""
        if self.empty is not None:
            entries = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in others]
            return BlockArrays((), jax.eval_shape(function, self.empty, *entries))
        return BlockArrays(
            tuple(
                function(block, *(stack[i] for stack in others))
                for i, block in enumerate(self.blocks)
            )
        )


Blocks = Array | BlockArrays
"""A stack `[L, ...]`, or its blocks."""


def is_block_arrays(value: object) -> bool:
    """Tests whether a value is a `BlockArrays`."""
    return isinstance(value, BlockArrays)


def view_blocks(stack: Shaped[Array, "L ..."]) -> Blocks:
    """Returns one array per block that shares the memory of a stack.

    Keep the stack alive. Accelerators' arrays cannot share memory, nor can blocks that
    start at unaligned addresses; there, the stack itself is returned.
    """
    [device] = stack.devices()
    if device.platform != "cpu" or stack.nbytes // len(stack) % ALIGNMENT:
        return stack
    # An array that is bound to a device would bind the results of programs too.
    target = device if stack.committed else None
    return BlockArrays(
        tuple(
            jax.device_put(block, target, may_alias=True) for block in np.asarray(stack)
        )
    )
