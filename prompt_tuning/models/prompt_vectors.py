"""Prompt vectors of each row, before they are joined to its text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from prompt_tuning.models.row_info import RowInfo, select_prompts
from prompt_tuning.prompts.prompt_module import InputDependentPrompt


def select_vectors(
    prompts: Float[Array, "N P D"], count: int, rows: RowInfo
) -> Float[Array, "_ nP D"]:
    """Returns the vectors of each row's `n` prompts, concatenated.

    With only one prompt, the first axis is 1 instead of `B`.
    """
    ids = rows.prompt_ids
    if ids is not None and ids.ndim == 2 and len(prompts) > 1:
        return prompts[ids].reshape(count, -1, prompts.shape[-1])
    by_row = prompts if len(prompts) == 1 else select_prompts(prompts, count, ids)
    return jnp.tile(by_row, (1, rows.examples, 1))


def vectors_of_texts(
    prompt: InputDependentPrompt,
    text: Float[Array, "B T D"],
    readable: Bool[Array, "B T"],
    rows: RowInfo,
    vocabulary_size: int,
    key: Key[Array, ""] | None,
) -> Float[Array, "B nP D"]:
    """Computes the vectors of a prompt that depends on the text, `n` prompts a row.

    Args:
      prompt: the prompt.
      text: embeddings of the tokens.
      readable: marks the tokens that the prompt may read.
      rows: the rows of text.
      vocabulary_size: ids from here on are prompt vectors that a template inserts.
      key: random key of dropout among the vectors; None for no dropout.
    """
    assert rows.vector_ids is not None  # rows of inputs always have them
    tokens = rows.vector_ids + vocabulary_size
    segments = rows.segments(text.shape[1])
    numbers = jnp.arange(1, rows.examples + 1)
    of_example = segments[:, None] == numbers[:, None]  # [B, n, T]
    masks = of_example & (readable & (rows.vector_ids < 0))[:, None]
    vectors = jax.vmap(lambda mask: prompt.for_text(tokens, text, mask, key), 1, 1)(
        masks
    )  # [B, n, P, D]
    return vectors.reshape(len(text), -1, text.shape[-1])
