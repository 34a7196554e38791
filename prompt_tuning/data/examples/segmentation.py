"""Where rows are cut into examples, and which of their tokens are real."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from prompt_tuning.core.token_weights import PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.rows.row_sources import RowBlock


class Pieces(NamedTuple):
    """`E` parts of some rows, in order; arrays `[E]`.

    Attributes:
      rows: the row of each, counted from the first of them.
      starts: its first token in the row.
      stops: one past its last; padding behind that is of no part.
    """

    rows: Int64[np.ndarray, "E"]
    starts: Int64[np.ndarray, "E"]
    stops: Int64[np.ndarray, "E"]


Cut = Callable[
    [Integer[np.ndarray, "c n"] | None, Bool[np.ndarray, "c n"]],
    Pieces,
]
"""Cuts rows that have types, or none, and of which some tokens are kept."""


def articles(
    token_types: Integer[np.ndarray, "c n"] | None, kept: Bool[np.ndarray, "c n"]
) -> Pieces:
    """Each article of each row: a separator (type 3) belongs to the one it ends.

    An article that a row ends or begins in the middle of is one too, as is a row
    without a separator, or without types. Padding behind a separator begins nothing.

    Args:
      token_types: of the rows, or None.
      kept: tokens that are not left out; a part ends with the last of its own.
    """
    if token_types is None:
        return whole_rows(token_types, kept)
    length = token_types.shape[1]
    real = np.flatnonzero(token_types != PADDING)
    separators = np.flatnonzero(token_types == SEPARATOR)
    after = np.searchsorted(real, separators, side="right")
    begins = real[after[after < len(real)]]
    # What follows the last separator of a row is in another row.
    inside = begins // length == separators[: len(begins)] // length
    return _pieces(np.union1d(_row_starts(kept), begins[inside]), kept)


def whole_rows(
    token_types: Integer[np.ndarray, "c n"] | None, kept: Bool[np.ndarray, "c n"]
) -> Pieces:
    """Each row as it is, whatever its types; see `articles`."""
    del token_types
    return _pieces(_row_starts(kept), kept)


def _row_starts(kept: Bool[np.ndarray, "c n"]) -> Int64[np.ndarray, "c"]:
    return np.arange(len(kept), dtype=np.int64) * kept.shape[1]


def _pieces(begins: Int64[np.ndarray, "E"], kept: Bool[np.ndarray, "c n"]) -> Pieces:
    """The parts that begin at some tokens, counted through all rows."""
    length = kept.shape[1]
    ends = np.where(kept, np.arange(1, length + 1, dtype=np.int32), 0)
    starts = begins % length
    stops = np.maximum(np.maximum.reduceat(ends.ravel(), begins), starts)
    return Pieces(begins // length, starts, stops.astype(np.int64))


def turns(token_types: Integer[np.ndarray, "n"]) -> list[tuple[int, int]]:
    """First and one past the last token of each turn: a prompt and its completion.

    A turn begins where a prompt token follows a completion token, padding aside.
    """
    tokens = np.flatnonzero(token_types != PADDING)
    given = token_types[tokens] == PROMPT
    begins = tokens[1:][given[1:] & ~given[:-1]].tolist()
    return list(zip([0, *begins], [*begins, len(token_types)], strict=True))


def real_lengths(block: RowBlock) -> Int64[np.ndarray, "c"]:
    """How long each row is without the padding (type 2) that ends it."""
    rows, length = block.input_ids.shape
    if block.token_types is None:
        return np.full(rows, length, np.int64)
    real = block.token_types != PADDING
    return np.max(np.where(real, np.arange(1, length + 1), 0), axis=1, initial=0)


def kept_tokens(block: RowBlock) -> Bool[np.ndarray, "c n"]:
    """Which tokens the data has, padding among them; not what fills shorter rows."""
    length = block.input_ids.shape[1]
    if block.lengths is None:
        return np.ones(block.input_ids.shape, bool)
    return np.arange(length) < block.lengths[:, None]
