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

    `lengths` counts each row's real tokens, prompt vectors included; `length` is the
    number of keys with padding.
    """
    return real_tokens(lengths, length)[:, None, None, :]


def decoder_causal_mask(length: int) -> Bool[Array, "1 1 Q K"]:
    """Lets each position attend to itself and to earlier positions."""
    return jnp.tri(length, dtype=bool)[None, None]


class CausalMask(NamedTuple):
    """Causal mask, described for fused kernels instead of stored as an array.

    Attributes:
      segments: segment of each position; None if each row is one segment.
    """

    segments: Int[Array, "B T"] | None = None

    def array(self, length: int) -> Bool[Array, "#B 1 T T"]:
        """Returns the mask as an array for rows of length `length`."""
        if self.segments is None:
            return decoder_causal_mask(length)
        return decoder_packed_mask(self.segments)


def decoder_packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Builds a causal mask for each segment of packed rows.

    Padding attends to padding.
    """
    # [B, 1, T, 1] == [B, 1, 1, T]
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return decoder_causal_mask(segment_ids.shape[1]) & same


def segment_mask(
    queries: Int[Array, "B Q"], keys: Int[Array, "B K"]
) -> Bool[Array, "B 1 Q K"]:
    """Lets each segment of a packed row attend only to itself; 0 marks padding."""
    # [B, 1, Q, 1] == [B, 1, 1, S]
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return same & (keys > 0)[:, None, None, :]


def region_mask(
    is_prompt: Bool[Array, "#B S"], sees: Visibility
) -> Bool[Array, "#B 1 S S"]:
    """Builds a mask where prompt and text attend to each other in both directions.

    Args:
      is_prompt: marks prompt vectors; a prompt's vectors are in order.
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
    """Builds a causal mask in which prompt and input tokens attend in both directions.

    If everything is visible, this is the third mask of Raffel et al. 2020, figure 3.

    Args:
      region: marks prompt vectors and input tokens.
      is_prompt: marks prompt vectors.
      sees: what the vectors attend to.
    """
    query, key = region[:, None, :, None], region[:, None, None, :]
    inside = key & region_mask(is_prompt, sees)
    return jnp.where(query, inside, decoder_causal_mask(region.shape[1]))
