"""Where a prompt stands in a row: before it, after its first token, or after its text.

A placement gives, for each row, how many of its tokens stand before the prompt. The
joined row then reads `tokens[:at], prompt, tokens[at:]`, padding last as before.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.masks import Count

Placement = Callable[[Int[Array, "B"], bool], Int[Array, "B"]]
"""`f(lengths [B], ends_with_eos) -> at [B]`.

`lengths` are the real tokens of an encoder's row, which ends with EOS, or the given
tokens of a decoder's row (those before its first completion token), which do not.
"""


def prefix(lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
    """The prompt first."""
    del ends_with_eos
    return jnp.zeros_like(lengths)


def after_bos(lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
    """The row's first token, the prompt, the rest."""
    del ends_with_eos
    return jnp.minimum(lengths, 1)


def suffix(lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
    """After the text, and before the EOS that ends it if there is one.

    In a decoder's row the text is what is given: the prompt stands between the
    question and the answer.
    """
    return jnp.maximum(lengths - int(ends_with_eos), 0)


def suffix_after_eos(lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
    """After the text and the EOS that ends it."""
    del ends_with_eos
    return lengths


PLACEMENTS: dict[str, Placement] = {
    "prefix": prefix,
    "after_bos": after_bos,
    "suffix": suffix,
    "suffix_after_eos": suffix_after_eos,
}


def put_first(
    prompt: Float[Array, "N P D"], text: Float[Array, "B T D"]
) -> Float[Array, "B S D"]:
    """Puts a prompt before each row: each its own, or one before all."""
    tiled = jnp.broadcast_to(prompt.astype(text.dtype), (len(text), *prompt.shape[1:]))
    return jnp.concatenate([tiled, text], axis=1)


def join(
    prompt: Float[Array, "N P D"],
    text: Float[Array, "B T D"],
    at: Int[Array, "B"],
    count: Count,
) -> Float[Array, "B S D"]:
    """Puts a prompt into each row, `at[b]` tokens from its start.

    Args:
      prompt: one for each row, or one for all.
      text: the rows.
      at: how many tokens stand before the prompt.
      count: vectors of the prompt that are no padding; the others come to stand last.
    """
    both, length = put_first(prompt, text), prompt.shape[1]
    place = jnp.arange(both.shape[1])
    start = at[:, None]
    after = place - count + length  # in `both`, where the text starts at `length`
    source = jnp.where(place < start, place + length, place - start)
    source = jnp.where(place < start + count, source, after)
    padding = place >= count + text.shape[1]
    source = jnp.where(padding, place - text.shape[1], source)
    return jnp.take_along_axis(both, source[..., None], axis=1, mode="clip")


def joined_position(
    positions: Int[Array, "B m"], at: Int[Array, "B"], count: Count
) -> Int[Array, "B m"]:
    """Where tokens stand once a prompt of `count` vectors was put in at `at`."""
    return positions + jnp.where(positions < at[:, None], 0, count)
