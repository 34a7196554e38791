"""The key/value cache: keys and values of earlier tokens, and buffers for new ones.

Rows of different lengths are continued together: the prefilled keys stay where they
are, padded on the right and masked, and every row writes its n-th new token to column n
of a separate buffer. A prompt that the batch shares is stored once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.recurrent_state import RecurrentState
from prompt_tuning.models.streams import Context, Kept, Stream


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all blocks while a batch of rows is continued.

    Attributes:
      next_positions: position of each row's first new token, `[B]`.
      past: prefilled keys and values, as a new token attends to them.
      generated: buffer for new tokens, `[L, G, B, capacity, K]`; see `KeyValues` for
        compressed ones.
      step: number of new tokens read.
      cross: the encoder's output; empty in a decoder-only model.
      state: states of recurrent layers after the last token; None without such layers.
      active: marks rows in which a token invoked the adapter; see `Stream.active`.
    """

    next_positions: Int[Array, "B"]
    past: tuple[Context, ...]
    generated: KeyValues
    step: Int[Array, ""]
    cross: tuple[Context, ...]
    state: RecurrentState | None = None
    active: Bool[Array, "B"] | None = None

    @classmethod
    def create(
        cls,
        next_positions: Int[Array, "B"],
        *,
        capacity: int,
        past: tuple[Context, ...],
        cross: tuple[Context, ...] = (),
        active: Bool[Array, "B"] | None = None,
    ) -> "Cache":
        """Allocates a cache with room for `capacity` new tokens.

        The keys of new tokens have the form of those right before them.
        """
        last, rows = past[-1], len(next_positions)
        assert isinstance(last.key_values, KeyValues)
        empty = KeyValues(
            *(
                jnp.zeros((*x.shape[:2], rows, capacity, x.shape[-1]), x.dtype)
                for x in last.key_values
            )
        )
        step = jnp.zeros((), jnp.int32)
        return cls(next_positions, past, empty, step, cross, last.state, active)

    def contexts(self) -> tuple[Context, ...]:
        """Returns all keys that a new token attends to, except its own."""
        columns = jnp.arange(self.generated.keys.shape[3])  # [capacity]
        written = (columns < self.step)[None, None, None]  # [1, 1, 1, capacity]
        positions = self.next_positions[:, None] + columns  # [B, capacity]
        generated = Context(self.generated, written, None, positions, self.state)
        return (*self.past, generated)

    def stream(self, embedded: Float[Array, "B 1 D"]) -> Stream:
        """Returns the stream of one new token per row."""
        positions = (self.next_positions + self.step)[:, None]
        active = None if self.active is None else self.active[:, None]
        return Stream(embedded, positions, None, active=active)

    def append(self, kept: Kept) -> "Cache":
        """Returns the cache after one more token, with its keys `[L, G, B, 1, K]`."""
        generated = KeyValues(
            *(
                jax.lax.dynamic_update_slice_in_dim(buffer, new, self.step, axis=3)
                for buffer, new in zip(self.generated, kept.key_values, strict=True)
            )
        )
        return dataclasses.replace(
            self, generated=generated, step=self.step + 1, state=kept.state
        )
