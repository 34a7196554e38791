"""Where prompts stand in a row: before it, after its first token, or after its text.

A placement gives, for each example, how many of its tokens stand before its prompt. The
joined row then reads `tokens[:at], prompt, tokens[at:]`, padding last as before; a
packed row has a prompt for each of its examples.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.masks import Count

TEMPLATE = "template"
"""The rows themselves say where the prompt's vectors stand."""

Placement = Callable[[Int[Array, "*lead"], bool], Int[Array, "*lead"]]
"""`f(lengths, ends_with_eos) -> at`.

`lengths` are the real tokens of an encoder's example, which ends with EOS, or the given
tokens of a decoder's (those before its first completion token), which do not.
"""


def prefix(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """The prompt first."""
    del ends_with_eos
    return jnp.zeros_like(lengths)


def after_bos(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """The example's first token, the prompt, the rest."""
    del ends_with_eos
    return jnp.minimum(lengths, 1)


def suffix(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """After the text, and before the EOS that ends it if there is one.

    In a decoder's row the text is what is given: the prompt stands between the
    question and the answer.
    """
    return jnp.maximum(lengths - int(ends_with_eos), 0)


def suffix_after_eos(
    lengths: Int[Array, "*lead"], ends_with_eos: bool
) -> Int[Array, "*lead"]:
    """After the text and the EOS that ends it."""
    del ends_with_eos
    return lengths


PLACEMENTS: dict[str, Placement] = {
    "prefix": prefix,
    "after_bos": after_bos,
    "suffix": suffix,
    "suffix_after_eos": suffix_after_eos,
}


class JoinedLayout(NamedTuple):
    """Rows of text with prompts among them.

    Attributes:
      source: what stands at each place: `i` for vector `i` of the row's `n * P`, one
        prompt after the other, and `n * P + t` for token `t`.
      segments: number of each place's example, from 1, 0 for padding.
      is_prompt: which places are prompt vectors, padding not counted.
    """

    source: Int[Array, "B S"]
    segments: Int[Array, "B S"]
    is_prompt: Bool[Array, "B S"]

    def of_text(self, values: Array, vectors: int) -> Array:
        """What is known of each token `[B, T]`, at the tokens' places; else 0.

        Args:
          values: numbers or booleans.
          vectors: the row's `n * P`.
        """
        padded = jnp.pad(values, ((0, 0), (vectors, 0)))
        return jnp.take_along_axis(padded, self.source, axis=1)


def lay_out(
    at: Int[Array, "B n"], segments: Int[Array, "B T"], count: Count, length: int
) -> JoinedLayout:
    """Puts a prompt into each example of each row.

    Args:
      at: how many tokens of the row stand before each example's prompt, rising; `T`
        where a row has fewer examples.
      segments: number of each token's example, from 1, 0 for padding.
      count: vectors of a prompt that are no padding.
      length: vectors `P` of a prompt; its padding comes to stand last.
    """
    rows, examples = at.shape
    text = segments.shape[1]
    number, vector = jnp.arange(examples)[:, None], jnp.arange(length)
    after = text + examples * count + number * (length - count) + vector - count
    of_vectors = jnp.where(
        vector < count, at[..., None] + number * count + vector, after
    )
    tokens = jnp.broadcast_to(jnp.arange(text), segments.shape)
    of_tokens = joined_position(tokens, at, count)
    place = jnp.concatenate([of_vectors.reshape(rows, -1), of_tokens], axis=1)
    source = _inverse(place)
    # A row without text still has its prompt.
    examples_of_row = jnp.maximum(segments.max(1), 1)[:, None, None]
    present = (number < examples_of_row) & (vector < count)
    owner = jnp.where(present, number + 1, 0).reshape(rows, -1)
    owners = jnp.concatenate([owner, segments], axis=1)
    joined = jnp.take_along_axis(owners, source, axis=1)
    return JoinedLayout(source, joined, (source < examples * length) & (joined > 0))


def lay_out_template(
    soft: Int[Array, "B T"], segments: Int[Array, "B T"], length: int, examples: int
) -> JoinedLayout:
    """Takes the prompts' vectors from where the rows themselves have them.

    Args:
      soft: which vector stands at each place, negative for text.
      segments: number of each place's example, from 1, 0 for padding.
      length: vectors `P` of a prompt.
      examples: most examples of a row, `n`.
    """
    is_prompt = (soft >= 0) & (segments > 0)
    vector = jnp.maximum(segments - 1, 0) * length + soft
    token = jnp.arange(soft.shape[1]) + examples * length
    return JoinedLayout(jnp.where(is_prompt, vector, token), segments, is_prompt)


def _inverse(place: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The inverse of each row's permutation."""
    rows = jnp.arange(len(place))[:, None]
    numbers = jnp.broadcast_to(jnp.arange(place.shape[1]), place.shape)
    return jnp.zeros_like(place).at[rows, place].set(numbers, unique_indices=True)


def put_first(
    prompt: Float[Array, "N P D"], text: Float[Array, "B T D"]
) -> Float[Array, "B S D"]:
    """Puts a prompt before each row: each its own, or one before all."""
    tiled = jnp.broadcast_to(prompt.astype(text.dtype), (len(text), *prompt.shape[1:]))
    return jnp.concatenate([tiled, text], axis=1)


def join(
    vectors: Float[Array, "#B nP D"], text: Float[Array, "B T D"], layout: JoinedLayout
) -> Float[Array, "B S D"]:
    """Puts the vectors of each row's prompts where a layout says."""
    both = put_first(vectors, text)
    return jnp.take_along_axis(both, layout.source[..., None], axis=1, mode="clip")


def joined_position(
    positions: Int[Array, "B m"], at: Int[Array, "B n"], count: Count
) -> Int[Array, "B m"]:
    """Where tokens stand once prompts of `count` vectors were put in at `at`."""
    before = (at[:, None, :] <= positions[..., None]).sum(-1)
    return positions + before * count
