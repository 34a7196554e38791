"""The arrays of the rows in slots, on the device, and how programs describe a row."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from prompt_tuning.core.block_arrays import BlockArrays
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.attention import KeyValues

Integers = Int[Array, "..."] | Int[np.ndarray, "..."]


class BlockKeyValues(NamedTuple):
    """Keys and values with an array for each block, `[L, G, B, S, K]`.

    A step writes into them in place, and reads them without copying any.
    """

    keys: BlockArrays
    values: BlockArrays

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: DTypeLike) -> "BlockKeyValues":
        """Returns zeros of a shape `[L, G, B, S, K]`."""
        return cls(*(BlockArrays.zeros(shape, dtype) for _ in range(2)))

    def map(self, function: Callable[..., Array], *others: Any) -> "BlockKeyValues":
        """Applies a function to the arrays of each block, and to entries of stacks.

        Args:
          function: of an array `[G, B, S, K]` and the entries.
          *others: more keys and values, stacked or not.
        """
        return BlockKeyValues(
            *(
                part.map(function, *entries)
                for part, *entries in zip(self, *others, strict=True)
            )
        )

    def as_source(self) -> KeyValues:
        """Returns them for a model that runs its blocks one by one."""
        return KeyValues(*(cast(Array, part) for part in self))

    def stacked(self) -> KeyValues:
        """Returns them for a model that scans over its blocks, which copies them."""
        return KeyValues(*(part.stacked() for part in self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What the device holds of all rows.

    Attributes:
      own: keys and values of each row, `[L, G, B, length, K]`.
      hidden: state that predicts each row's next token, `[B, D]`.
      cross: keys and values of each row's encoder output, `[L, G, B, E, K]`; None in a
        decoder-only model.
      cross_mask: marks those that are not padding, `[B, E]`.
    """

    own: BlockKeyValues
    hidden: Float[Array, "B D"]
    cross: BlockKeyValues | None
    cross_mask: Bool[Array, "B E"] | None

    @classmethod
    def create(cls, config: ModelConfig, count: int, length: int) -> "Slots":
        """Returns empty slots.

        Args:
          config: config of the model.
          count: number of slots.
          length: number of positions of each slot, and of an encoder's output.
        """
        groups, width = config.key_value_heads, config.head_width
        shape = (config.layers, groups, count, length, width)
        decodes_alone = config.architecture == "decoder_only"
        return cls(
            BlockKeyValues.zeros(shape, config.dtype),
            jnp.zeros((count, config.width), config.dtype),
            None if decodes_alone else BlockKeyValues.zeros(shape, config.dtype),
            None if decodes_alone else jnp.zeros((count, length), bool),
        )

    @property
    def key_value_bytes(self) -> int:
        """Size of all keys and values."""
        return sum(part.nbytes for part in (*self.own, *(self.cross or ())))


class Page(NamedTuple):
    """Keys and values of a stretch of a prompt or of a shared text.

    Attributes:
      keys: `[L, G, 1, K, page]`, in the order in which products on CPUs read them.
      values: `[L, G, 1, page, K]`.
      start: position of the first key.
    """

    keys: BlockArrays
    values: BlockArrays
    start: Int[Array, ""]

    @classmethod
    def create(cls, key_values: KeyValues, start: Int[Array, ""] | int) -> "Page":
        """Returns a page of keys and values `[L, G, 1, page, K]`."""
        keys, values = (BlockArrays(tuple(part)) for part in key_values)
        return cls(keys.map(_transposed), values, jnp.asarray(start, jnp.int32))

    @property
    def size(self) -> int:
        """Number of keys."""
        return self.values.shape[3]

    @property
    def key_value_bytes(self) -> int:
        """Size of its keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def key_values(self) -> BlockKeyValues:
        """Returns keys and values `[L, G, 1, page, K]`, in a program."""
        return BlockKeyValues(self.keys.map(_transposed), self.values)


def _transposed(array: Array) -> Array:
    return jnp.swapaxes(array, -1, -2)


class RowStates(NamedTuple):
    """What a program needs to know of each row.

    Attributes:
      written: number of the row's keys.
      first: position of the first of these.
      active: whether the row reads a token.
      entry: its entry in the tables of adapters of projections.
      visible: number of keys that it sees of each page.
    """

    written: Integers
    first: Integers
    active: Bool[Array, "B"] | Bool[np.ndarray, "B"]
    entry: Integers
    visible: Integers
