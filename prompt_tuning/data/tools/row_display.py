"""Rows as a person reads them: what each token says, is, and weighs."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, token_weights
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.rows.jsonl import LineEncoder
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.rows.row_sources import JSONL_SUFFIX, RowSource
from prompt_tuning.data.text.tokenizers import SPACE_MARKS, Tokenizer

MOST_IDS = 16
"""Ids of one character, at most: a character of UTF-8 may be cut in several tokens."""


@dataclasses.dataclass(frozen=True)
class ShownToken:
    """One token of a row.

    Attributes:
      place: in the row.
      id: of the vocabulary.
      text: what it adds to the text before it; empty where a character is not yet
        whole.
      type: 0 to 3; 1 where the data has no types.
      weight: of its loss.
    """

    place: int
    id: int
    text: str
    type: int
    weight: float


@dataclasses.dataclass(frozen=True)
class ShownRow:
    """One row.

    Attributes:
      number: among all rows.
      where: the file and its line or row.
      tokens: in order.
      typed: whether the data has types.
    """

    number: int
    where: str
    tokens: Sequence[ShownToken]
    typed: bool


def open_rows(
    path: Path, tokenizer: Tokenizer | None, *, add_eos: bool = True, **keys
) -> RowSource:
    """Opens a file of rows.

    Args:
      path: path of an HDF5 or a jsonl file.
      tokenizer: encodes the text of a jsonl file.
      add_eos: whether to append EOS to each row of a jsonl file.
      **keys: keys of a jsonl file; arguments of `LineEncoder`.

    Raises:
      InputError: if the file cannot be read, or a tokenizer is missing for its text.
    """
    if path.suffix != JSONL_SUFFIX:
        return Hdf5Rows(path)
    if tokenizer is None:
        raise InputError(f"{path} contains text: name a --tokenizer to encode it with")
    return JsonlRows(path, LineEncoder(tokenizer, **keys), add_eos=add_eos)


def shown_row(
    rows: RowSource,
    number: int,
    tokenizer: Tokenizer | None,
    *,
    prompt_loss_weight: float = 0.0,
) -> ShownRow:
    """A row whose tokens weigh what they weigh in training.

    Args:
      rows: of one or several files.
      number: of the row.
      tokenizer: tells the texts; without it they are the ids.
      prompt_loss_weight: weight of type 0, where the data has types.

    Raises:
      InputError: if there is no such row, or a type is outside 0 to 3.
    """
    if not 0 <= number < len(rows):
        raise InputError(f"row {number}: expected 0 to {len(rows) - 1}")
    row, where = rows[number], rows.describe(number)
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
        raise InputError(f"{where}: {error}") from error
    known = np.full(len(ids), COMPLETION) if types is None else types
    tokens = [
        ShownToken(place, int(id), text, int(kind), float(weight))
        for place, (id, text, kind, weight) in enumerate(
            zip(ids, token_texts(ids.tolist(), tokenizer), known, weights, strict=True)
        )
    ]
    return ShownRow(number, where, tokens, types is not None)


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> Iterator[str]:
    """What each token adds to the text of those before it.

    Special tokens, which a text does not show, are told by their names; so is what is
    not in the vocabulary. Without a tokenizer each is its id.
    """
    if tokenizer is None:
        yield from (f"{id} " for id in ids)
        return
    pending: list[int] = []
    before: list[int] = []
    for id in ids:
        known = [*before, *pending]
        silent = tokenizer.decode([*known, id]) == tokenizer.decode(known)
        mark = tokenizer.token(id) in SPACE_MARKS
        if silent and not mark and not tokenizer.decode([id]):
            # It is no text: a special token, or one past the vocabulary.
            yield "\ufffd" * bool(pending) + tokenizer.token(id)
            pending, before = [], []
            continue
        text = _added(tokenizer, before, [*pending, id])
        if text.endswith("\ufffd") and len(pending) < MOST_IDS:
            pending.append(id)
            yield ""
            continue
        yield text
        # One whole token is enough to tell whether a space stands before the next.
        pending, before = [], [id]


def _added(tokenizer: Tokenizer, before: Sequence[int], new: Sequence[int]) -> str:
    """What new tokens add to the text of those before."""
    head = tokenizer.decode(before) if before else ""
    whole = tokenizer.decode([*before, *new])
    return whole.removeprefix(head) if head else tokenizer.decode(new)
