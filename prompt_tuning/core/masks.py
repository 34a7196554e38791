"""Attention masks, as pure functions: True where a query may attend to a key.

Every mask broadcasts to `[B, 1, Q, S]`. Rows are padded on the right, so a causal
decoder needs no padding mask: padding follows all real tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from prompt_tuning.core.visibility import Visibility

Count = int | Int[Array, ""]
"""Number of vectors of a prompt; an array if prompts are padded to one length."""


def real_tokens(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B T"]:
    """Marks the first `lengths[b]` of `length` positions in each row."""
    return jnp.arange(length) < lengths[:, None]


def encoder_mask(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B 1 1 K"]:
    """Lets all real tokens of a row attend to each other.

    Args:
      lengths: number of real tokens of each row, including prompt vectors.
      length: number of keys in a row, padding included.
    """
    return real_tokens(lengths, length)[:, None, None, :]


def decoder_causal_mask(length: int) -> Bool[Array, "1 1 Q K"]:
    """Lets each position attend to itself and to earlier positions."""
    return jnp.tri(length, dtype=bool)[None, None]


class CausalMask(NamedTuple):
    """Causal mask, as a description that fused kernels read instead of an array.

    Attributes:
      segments: number of each position's segment; None if each row is one segment.
    """

    segments: Int[Array, "B T"] | None = None

    def array(self, length: int) -> Bool[Array, "#B 1 T T"]:
        """Returns the mask for rows of a length."""
        if self.segments is None:
            return decoder_causal_mask(length)
        return decoder_packed_mask(self.segments)


def decoder_packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Causal mask within each segment of a packed row; padding attends to padding."""
    # [B, 1, T, 1] == [B, 1, 1, T]
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return decoder_causal_mask(segment_ids.shape[1]) & same


def segment_mask(
    queries: Int[Array, "B Q"], keys: Int[Array, "B K"]
) -> Bool[Array, "B 1 Q K"]:
    """Lets each segment of a packed row attend to itself only.

    Args:
      queries: number of each query's segment, 0 for padding.
      keys: number of each key's segment, 0 for padding.
    """
    # [B, 1, Q, 1] == [B, 1, 1, S]
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return same & (keys > 0)[:, None, None, :]


def region_mask(
    is_prompt: Bool[Array, "#B S"], sees: Visibility
) -> Bool[Array, "#B 1 S S"]:
    """Mask where prompt and text attend to each other in both directions.

    Args:
      is_prompt: which positions are prompt vectors; the vectors of one prompt are in
        order.
      sees: what the vectors attend to.
    """
    length = is_prompt.shape[1]
    query, key = is_prompt[:, None, :, None], is_prompt[:, None, None, :]
    itself = jnp.eye(length, dtype=bool)
    # [S, S]: what a prompt vector sees of the vectors of its prompt.
    within_prompt = itself
    if sees.prompt:
        within_prompt = (
            jnp.tri(length, dtype=bool) if sees.causal else jnp.ones_like(itself)
        )
    # [B, 1, S, S]: text queries see everything.
    return ~query | jnp.where(key, within_prompt, sees.input)


def decoder_region_mask(
    region: Bool[Array, "B S"], is_prompt: Bool[Array, "B S"], sees: Visibility
) -> Bool[Array, "B 1 S S"]:
    """Causal mask, but prompt and given tokens attend in both directions.

    If everything is visible, this is the third mask of Raffel et al. 2020, figure 3.

    Args:
      region: positions of prompt vectors and given tokens.
      is_prompt: positions of prompt vectors.
      sees: what the vectors attend to.
    """
    query, key = region[:, None, :, None], region[:, None, None, :]
    inside = key & region_mask(is_prompt, sees)
    return jnp.where(query, inside, decoder_causal_mask(region.shape[1]))
