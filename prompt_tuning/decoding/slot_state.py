"""What the device holds of the rows in slots, and what programs know of each row."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.attention import KeyValues

Integers = Int[Array, "..."] | Int[np.ndarray, "..."]


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

    own: KeyValues
    hidden: Float[Array, "B D"]
    cross: KeyValues | None
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

        def empty() -> KeyValues:
            return KeyValues(*(jnp.zeros(shape, config.dtype) for _ in range(2)))

        decodes_alone = config.architecture == "decoder_only"
        return cls(
            empty(),
            jnp.zeros((count, config.width), config.dtype),
            None if decodes_alone else empty(),
            None if decodes_alone else jnp.zeros((count, length), bool),
        )

    @property
    def key_value_bytes(self) -> int:
        """Size of all keys and values."""
        return sum(part.nbytes for part in (*self.own, *(self.cross or ())))


class Page(NamedTuple):
    """Keys and values of a stretch of a prompt or of a shared text.

    Attributes:
      key_values: `[L, G, 1, page, K]`.
      start: position of the first key.
    """

    key_values: KeyValues
    start: Int[Array, ""]

    @property
    def key_value_bytes(self) -> int:
        """Size of its keys and values."""
        return sum(part.nbytes for part in self.key_values)


class RowStates(NamedTuple):
    """What a program needs to know of each row.

    Attributes:
      written: number of its own keys.
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
