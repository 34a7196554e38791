"""Rows of token ids: pad them, cut them at their end, and decode them."""

import itertools
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Int

from prompt_tuning.data.text.added_text import added_text, complete_text
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.pretrained.prompted_model import PromptedModel

LENGTH_MULTIPLE = 16
"""Lengths are padded to multiples of this, to compile few shapes."""


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Pads rows on the right to a common length.

    Returns the tokens `[B, T]`, and the number of real ones per row `[B]`.
    """
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def strip_end(row: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Cuts a generated row before the token that ends it."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, map(int, row)))


def decode_continuations(
    model: PromptedModel,
    rows: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[str]:
    """Decodes generated ids, as continuations of their rows or as separate texts."""
    tokenizer = model.needed_tokenizer()
    if model.config.architecture == "encoder_decoder":
        return [tokenizer.decode(row) for row in continuations]
    # Ids from the vocabulary's size on stand for the prompt vectors of a template.
    size = model.config.vocabulary_size
    return [
        continuation_text(tokenizer, [i for i in row if i < size], new)
        for row, new in zip(rows, continuations, strict=True)
    ]


def continuation_text(
    tokenizer: Tokenizer, given: Sequence[int], new: Sequence[int]
) -> str:
    """Decodes new ids to the text that they add to the given ids.

    Decoded alone they would lose a leading space, because sentencepiece drops the space
    that it inserts before every text. A character that the new ids complete is part of
    the result.
    """
    given_text = tokenizer.decode(given)
    if not given_text:
        return tokenizer.decode(new)
    whole = tokenizer.decode([*given, *new])
    return added_text(given_text, whole, complete_text(tokenizer, given))


def row_lengths(chunk: int, limit: int) -> list[int]:
    """Returns the padded lengths of whole rows, from `chunk` up to a limit."""
    lengths = [min(chunk, limit)]
    while lengths[-1] < limit:
        lengths.append(min(2 * lengths[-1], limit))
    return lengths
