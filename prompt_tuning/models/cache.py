"""The key/value cache: what was read, kept in parts, and room for what comes.

Rows of different lengths sit side by side: what was prefilled stays where it is, padded
on the right and masked, and every row writes its n-th new token into column n of a
buffer of its own. A prompt that the batch shares is kept once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.sharding import collectives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of all blocks while a batch of rows is continued.

    Attributes:
      following: position of each row's first new token, `[B]`.
      past: what was prefilled, and what a new token sees of it.
      generated: buffer for new tokens, `[L, B, room, G, K]`.
      step: how many new tokens were read.
      cross: the encoder's output, empty in a decoder-only model.
    """

    next_positions: Int[Array, "B"]
    past: tuple[Context, ...]
    generated: KeyValues
    step: Int[Array, ""]
    cross: tuple[Context, ...]

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        following: Int[Array, "B"],
        *,
        capacity: int,
        past: tuple[Context, ...] = (),
        cross: tuple[Context, ...] = (),
    ) -> "Cache":
        """A cache with nothing generated yet and room for `room` tokens."""
        shape = (
            config.layers,
            following.shape[0],
            capacity,
            collectives.local_group_count(config.key_value_heads),
            config.head_width,
        )
        empty = KeyValues(*(jnp.zeros(shape, config.dtype) for _ in range(2)))
        return cls(following, past, empty, jnp.zeros((), jnp.int32), cross)

    def contexts(self) -> tuple[Context, ...]:
        """All keys that a new token may see, itself excepted."""
        room = jnp.arange(self.generated.keys.shape[2])
        written = (room < self.step)[None, None, None]
        places = self.next_positions[:, None] + room
        return (*self.past, Context(self.generated, written, None, places))

    def stream(self, embedded: Float[Array, "B 1 D"]) -> Stream:
        """One new token of every row."""
        return Stream(embedded, (self.next_positions + self.step)[:, None], None)

    def append(self, made: KeyValues) -> "Cache":
        """The cache after one more token, whose keys are `[L, B, 1, G, K]`."""
        written = KeyValues(
            *(
                jax.lax.dynamic_update_slice_in_dim(buffer, new, self.step, axis=2)
                for buffer, new in zip(self.generated, made, strict=True)
            )
        )
        return dataclasses.replace(self, generated=written, step=self.step + 1)
