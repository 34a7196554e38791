"""Positions of prompts in a row: before the text, after its first token, or after it.

A placement returns how many tokens of each example precede its prompt. The joined row
is then `tokens[:point], prompt, tokens[point:]`, with padding still last. A packed row
has a prompt for each of its examples.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.masks import Count

TEMPLATE: Final = "template"
"""The data sets the positions of the prompt's vectors."""

Placement = Callable[[Int[Array, "*lead"], bool], Int[Array, "*lead"]]
"""`f(lengths, ends_with_eos) -> point`.

`lengths` counts the real tokens of an encoder's example, which ends with EOS, or the
given tokens of a decoder's example (before its first completion token), which do not.
"""


def prefix(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """Puts the prompt first."""
    del ends_with_eos
    return jnp.zeros_like(lengths)


def after_bos(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """Puts the prompt after the example's first token."""
    del ends_with_eos
    return jnp.minimum(lengths, 1)


def suffix(lengths: Int[Array, "*lead"], ends_with_eos: bool) -> Int[Array, "*lead"]:
    """Puts the prompt after the text, but before an EOS that ends it.

    In a decoder's row the text means the input tokens, so the prompt is between
    question and answer.
    """
    return jnp.maximum(lengths - int(ends_with_eos), 0)


def suffix_after_eos(
    lengths: Int[Array, "*lead"], ends_with_eos: bool
) -> Int[Array, "*lead"]:
    """Puts the prompt after the text and the EOS that ends it."""
    del ends_with_eos
    return lengths


PLACEMENTS: dict[str, Placement] = {
    "prefix": prefix,
    "after_bos": after_bos,
    "suffix": suffix,
    "suffix_after_eos": suffix_after_eos,
}


class JoinedLayout(NamedTuple):
    """Layout of rows of text with prompts inserted.

    Attributes:
      source: source of each position: `i` for vector `i` of the row's `n * P` vectors,
        one prompt after the other, and `n * P + t` for token `t`.
      segments: example of each position, from 1; 0 for padding.
      is_prompt: whether each position is a prompt vector other than padding.
    """

    source: Int[Array, "B S"]
    segments: Int[Array, "B S"]
    is_prompt: Bool[Array, "B S"]

    def of_text(self, values: Array, vectors: int) -> Array:
        """Moves values of tokens, `[B, T]`, to their positions; other positions get 0.

        `vectors` is the number of vectors in a row, `n * P`.
        """
        padded = jnp.pad(values, ((0, 0), (vectors, 0)))
        return jnp.take_along_axis(padded, self.source, axis=1)


def lay_out(
    points: Int[Array, "B n"], segments: Int[Array, "B T"], count: Count, length: int
) -> JoinedLayout:
    """Inserts a prompt into each example of each row.

    Args:
      points: how many of the row's tokens precede each example's prompt, ascending; `T`
        for examples that a row does not have.
      segments: example of each token, from 1; 0 for padding.
      count: number of a prompt's vectors without padding.
      length: number of vectors `P` of a prompt; its padding moves to the end.
    """
    rows, examples = points.shape
    text = segments.shape[1]
    number, vector = jnp.arange(examples)[:, None], jnp.arange(length)
    # Padding of all prompts follows all real vectors and tokens.
    padding = text + examples * count + number * (length - count) + vector - count
    vector_positions = jnp.where(
        vector < count, points[..., None] + number * count + vector, padding
    )  # [B, n, P]
    tokens = jnp.broadcast_to(jnp.arange(text), segments.shape)
    token_positions = joined_position(tokens, points, count)  # [B, T]
    positions = [vector_positions.reshape(rows, -1), token_positions]
    source = _invert(jnp.concatenate(positions, axis=1))  # [B, n * P + T]
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
    """Puts the prompts' vectors at the positions that the data sets.

    Args:
      soft: index of the vector at each position, negative for text.
      segments: example of each position, from 1; 0 for padding.
      length: number of vectors `P` of a prompt.
      examples: maximum number of examples in a row, `n`.
    """
    is_prompt = (soft >= 0) & (segments > 0)
    vector = jnp.maximum(segments - 1, 0) * length + soft
    token = jnp.arange(soft.shape[1]) + examples * length
    return JoinedLayout(jnp.where(is_prompt, vector, token), segments, is_prompt)


def _invert(permutation: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Inverts each row's permutation."""
    rows = jnp.arange(len(permutation))[:, None]
    numbers = jnp.broadcast_to(jnp.arange(permutation.shape[1]), permutation.shape)
    zeros = jnp.zeros_like(permutation)
    return zeros.at[rows, permutation].set(numbers, unique_indices=True)


def put_first(
    prompt: Float[Array, "N P D"], text: Float[Array, "B T D"]
) -> Float[Array, "B S D"]:
    """Puts a prompt before each row: one per row, or one shared by all rows."""
    tiled = jnp.broadcast_to(prompt.astype(text.dtype), (len(text), *prompt.shape[1:]))
    return jnp.concatenate([tiled, text], axis=1)


def join(
    vectors: Float[Array, "#B nP D"], text: Float[Array, "B T D"], layout: JoinedLayout
) -> Float[Array, "B S D"]:
    """Joins each row's prompt vectors and text in the order of a layout."""
    unordered = put_first(vectors, text)
    indices = layout.source[..., None]
    return jnp.take_along_axis(unordered, indices, axis=1, mode="clip")


def joined_position(
    positions: Int[Array, "B m"], points: Int[Array, "B n"], count: Count
) -> Int[Array, "B m"]:
    """Positions of tokens after prompts of `count` vectors are inserted at `points`."""
    prompts_before = (points[:, None, :] <= positions[..., None]).sum(-1)  # [B, m]
    return positions + prompts_before * count
