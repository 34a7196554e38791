"""Prepares rows for display: the text, type and loss weight of every token."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, token_weights
from prompt_tuning.data.rows.data_files import contains_text, list_files
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.rows.jsonl import LineEncoder
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.rows.line_formats import (
    FormatChoice,
    choose_encoder,
    first_record,
)
from prompt_tuning.data.rows.row_sources import RowSource
from prompt_tuning.data.text.added_text import added_text
from prompt_tuning.data.text.tokenizers import SPACE_MARKS, Tokenizer

MAXIMUM_IDS = 16
"""Maximum number of tokens of one character, whose UTF-8 bytes may be split."""


@dataclasses.dataclass(frozen=True)
class ShownToken:
    """One token of a row.

    Attributes:
      position: position in the row.
      id: token id.
      text: text that it adds to the previous tokens; empty within a character.
      type: token type, 0 to 3; 1 if the data has no types.
      weight: loss weight.
    """

    position: int
    id: int
    text: str
    type: int
    weight: float


@dataclasses.dataclass(frozen=True)
class ShownRow:
    """One row, by number and location; `typed` if the data has types."""

    number: int
    location: str
    tokens: Sequence[ShownToken]
    typed: bool


def open_rows(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    add_eos: bool = True,
    choice: FormatChoice | None = None,
    **keys,
) -> RowSource:
    """Opens the rows of a file, a folder or a glob.

    `keys` are keys of lines; arguments of `LineEncoder`. Text needs a tokenizer.
    """
    paths = list_files(path)
    if not contains_text(paths):
        return Hdf5Rows(paths)
    if tokenizer is None:
        raise InputError(
            f"{paths[0]} contains text: name a --tokenizer to encode it with"
        )
    pairs = LineEncoder(tokenizer, **keys)
    encoder = choose_encoder(
        paths[0], first_record(paths[0]), choice or FormatChoice(), pairs
    )
    return JsonlRows(paths, encoder, add_eos=add_eos)


def display_row(
    rows: RowSource,
    number: int,
    tokenizer: Tokenizer | None,
    *,
    prompt_loss_weight: float | int = 0.0,
) -> ShownRow:
    """Returns a row with the loss weights that its tokens have in training.

    Without a tokenizer, the text of a token is its id. `prompt_loss_weight` is the
    weight of prompt tokens (type 0), if the data has types.
    """
    if not 0 <= number < len(rows):
        raise InputError(f"row {number}: expected 0 to {len(rows) - 1}")
    row, location = rows[number], rows.describe(number)
    ids, types = row.input_ids, row.token_types
    try:
        weights = row.values.scale(
            token_weights(
                types,
                ids.shape,
                use_token_type_ids=types is not None,
                prompt_loss_weight=prompt_loss_weight,
            )
        )
    except InputError as error:
        raise InputError(f"{location}: {error}") from error
    shown_types = np.full(len(ids), COMPLETION) if types is None else types
    texts = token_texts(ids.tolist(), tokenizer)
    tokens = [
        ShownToken(position, int(id), text, int(kind), float(weight))
        for position, (id, text, kind, weight) in enumerate(
            zip(ids, texts, shown_types, weights, strict=True)
        )
    ]
    return ShownRow(number, location, tokens, types is not None)


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yields the texts that tokens add to the previous ones.

    Special tokens and ids outside the vocabulary, which decode to nothing, are shown by
    name. Without a tokenizer, the text of a token is its id.
    """
    if tokenizer is None:
        yield from (f"{id} " for id in ids)
        return

    @functools.lru_cache(maxsize=64)  # each pair of neighbors is decoded several times
    def decode(*ids: int) -> str:
        return tokenizer.decode(ids)

    pending: list[int] = []
    before: list[int] = []
    for id in ids:
        previous = [*before, *pending]
        silent = decode(*previous, id) == decode(*previous)
        if silent and tokenizer.token(id) not in SPACE_MARKS and not decode(id):
            # A special token, or an id outside the vocabulary.
            yield "\ufffd" * bool(pending) + tokenizer.token(id)
            pending, before = [], []
            continue
        text = _text_of(decode, before, [*pending, id])
        if text.endswith("\ufffd") and len(pending) < MAXIMUM_IDS:
            pending.append(id)
            yield ""
            continue
        yield text
        # One complete token suffices to determine if a space precedes the next one.
        pending, before = [], [id]


def _text_of(
    decode: Callable[..., str], before: Sequence[int], new: Sequence[int]
) -> str:
    head = decode(*before) if before else ""
    whole = decode(*before, *new)
    return added_text(head, whole) if head else decode(*new)
