"""Who sees whom: pure functions, True where a query may attend to a key.

Every mask broadcasts to `[B, 1, Q, K]`. Rows are padded on the right, so a causal
decoder needs no padding mask: no real token stands after padding.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Count = int | Int[Array, ""]
"""How many vectors a prompt has; an array where several prompts are padded to one."""


def real_tokens(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B T"]:
    """Marks the first `lengths[b]` of `length` places of each row."""
    return jnp.arange(length) < lengths[:, None]


def encoder_mask(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B 1 1 K"]:
    """All real tokens of a row see each other.

    Args:
      lengths: real tokens of each row; with a prompt, its vectors are counted.
      length: keys in a row, padding included.
    """
    return real_tokens(lengths, length)[:, None, None, :]


def decoder_causal_mask(length: int) -> Bool[Array, "1 1 Q K"]:
    """Each position sees itself and what stands before it."""
    return jnp.tri(length, dtype=bool)[None, None]


def decoder_prefix_mask(
    prefix_lengths: Int[Array, "B"], length: int
) -> Bool[Array, "B 1 Q K"]:
    """Causal, and the first `prefix_lengths[b]` positions see each other both ways.

    The third mask of Raffel et al. 2020, figure 3. With a prompt, its vectors are
    counted in the prefix.
    """
    in_prefix = real_tokens(prefix_lengths, length)[:, None, None, :]
    return decoder_causal_mask(length) | in_prefix


def decoder_packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Causal, and each example of a packed row sees itself alone.

    Args:
      segment_ids: number of each token's example.
    """
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return decoder_causal_mask(segment_ids.shape[1]) & same


def prompt_isolated_mask(
    lengths: Int[Array, "B"], at: Int[Array, "B"], count: Count, length: int
) -> Bool[Array, "B 1 Q K"]:
    """All real positions of a row see each other, but the prompt sees itself alone.

    Args:
      lengths: real positions of each row, prompt vectors counted.
      at: how many tokens of each row stand before the prompt.
      count: vectors of the prompt.
      length: positions in a row, padding included.
    """
    place = jnp.arange(length)
    inside = (place >= at[:, None]) & (place < at[:, None] + count)
    sees = inside[:, None, None, :] | ~inside[:, None, :, None]
    return encoder_mask(lengths, length) & sees
