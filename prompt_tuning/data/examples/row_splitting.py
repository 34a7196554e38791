"""Where rows are split into examples, and which of their tokens are real."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from prompt_tuning.core.token_weights import PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.rows.row_sources import RowBlock


class ExampleBounds(NamedTuple):
    """The bounds of `E` examples within some rows, in order; arrays `[E]`.

    Attributes:
      rows: row of the example, relative to the first of the rows.
      starts: position of its first token in the row.
      stops: position after its last token.
      lengths: number of its tokens, without padding among them.
    """

    rows: Int64[np.ndarray, "E"]
    starts: Int64[np.ndarray, "E"]
    stops: Int64[np.ndarray, "E"]
    lengths: Int64[np.ndarray, "E"]


def split_at_separators(
    token_types: Integer[np.ndarray, "c n"] | None, included: Bool[np.ndarray, "c n"]
) -> ExampleBounds:
    """Splits each row after its separators (type 3), given the rows' types, if any.

    A separator belongs to the example that it ends. The part of a row before its first
    separator or after its last one is an example too, as is a row without separators or
    without types. Padding does not begin an example, wherever it stands. An example
    begins with its first `included` token and stops after its last one.
    """
    if token_types is None:
        return keep_whole_rows(token_types, included)
    length = token_types.shape[1]
    # Positions in the flattened rows, `[c * n]`.
    real = np.flatnonzero(token_types != PADDING)
    separators = np.flatnonzero(token_types == SEPARATOR)
    following = np.searchsorted(real, separators, side="right")
    begins = real[following[following < len(real)]]
    # The first real token after the last separator of a row is in another row.
    in_same_row = begins // length == separators[: len(begins)] // length
    begins = np.union1d(_row_starts(included), begins[in_same_row])
    return _bounds(begins, included)


def keep_whole_rows(
    token_types: Integer[np.ndarray, "c n"] | None, included: Bool[np.ndarray, "c n"]
) -> ExampleBounds:
    """Makes each row one example, whatever its types; see `split_at_separators`."""
    del token_types
    return _bounds(_row_starts(included), included)


def _row_starts(included: Bool[np.ndarray, "c n"]) -> Int64[np.ndarray, "c"]:
    rows = np.arange(len(included), dtype=np.int64)
    return rows * included.shape[1] + included.argmax(axis=1)


def _bounds(
    begins: Int64[np.ndarray, "E"], included: Bool[np.ndarray, "c n"]
) -> ExampleBounds:
    """Returns the bounds of examples that begin at positions of the flattened rows."""
    length = included.shape[1]
    # [c, n]: the stop that each included token implies; an example's is their maximum.
    stops = np.where(included, np.arange(1, length + 1, dtype=np.int32), 0)
    starts = begins % length
    stops = np.maximum(np.maximum.reduceat(stops.ravel(), begins), starts)
    counts = np.add.reduceat(included.ravel(), begins, dtype=np.int64)
    return ExampleBounds(begins // length, starts, stops.astype(np.int64), counts)


def token_positions(
    bounds: ExampleBounds, included: Bool[np.ndarray, "c n"], number: int
) -> Int64[np.ndarray, "E"]:
    """Returns where token `number` of every example stands, not counting padding.

    It is the example's stop if the example has fewer tokens.
    """
    # Position 0 stands for the tokens that do not exist.
    positions = np.append(np.flatnonzero(included), 0)
    begins = bounds.rows * included.shape[1] + bounds.starts
    first = np.searchsorted(positions[:-1], begins)
    exists = number < bounds.lengths
    chosen = positions[np.where(exists, first + number, -1)] % included.shape[1]
    return np.where(exists, chosen, bounds.stops)


def find_turns(token_types: Integer[np.ndarray, "n"]) -> list[tuple[int, int]]:
    """Returns the start and stop of every turn: a prompt and its completion.

    A turn begins where a prompt token follows a completion token, ignoring padding.
    """
    tokens = np.flatnonzero(token_types != PADDING)
    is_prompt = token_types[tokens] == PROMPT
    begins = tokens[1:][is_prompt[1:] & ~is_prompt[:-1]].tolist()
    return list(zip([0, *begins], [*begins, len(token_types)], strict=True))


def unpadded_lengths(block: RowBlock) -> Int64[np.ndarray, "c"]:
    """Returns the lengths of the rows without their trailing padding (type 2)."""
    rows, length = block.input_ids.shape
    if block.token_types is None:
        return np.full(rows, length, np.int64)
    real = block.token_types != PADDING
    return np.max(np.where(real, np.arange(1, length + 1), 0), axis=1, initial=0)


def stored_tokens(block: RowBlock) -> Bool[np.ndarray, "c n"]:
    """Returns a mask of the tokens in the data.

    It includes padding that the data contains, but not the tokens that fill shorter
    rows up to the width of the block.
    """
    length = block.input_ids.shape[1]
    if block.lengths is None:
        return np.ones(block.input_ids.shape, bool)
    return np.arange(length) < block.lengths[:, None]
