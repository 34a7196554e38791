"""Rows of token ids, and the interface of the files that they are read from."""

import abc
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64, Integer

from prompt_tuning.data.rows.token_columns import TokenValues

ROWS_PER_BLOCK = 1024
"""Number of rows that are read at a time when all rows are checked."""

BLOCK_TOKENS = 2**22
"""Number of tokens above which fewer rows are read at a time."""

DescribeRow = Callable[[int], str]
"""Returns the location of a row, for messages."""


class Row(NamedTuple):
    """One row of `n` tokens.

    Attributes:
      input_ids: token ids, `[n]`.
      token_types: types 0 to 3, `[n]`; None if the data has none.
      values: weights and other numbers of the tokens, `[n]`.
    """

    input_ids: Int32[np.ndarray, "n"]
    token_types: Int32[np.ndarray, "n"] | None
    values: TokenValues = TokenValues()


class RowBlock(NamedTuple):
    """Rows `start` to `start + c` as read, before ids and types are checked.

    Attributes:
      start: number of the first row.
      input_ids: token ids, `[c, n]`.
      token_types: types, `[c, n]`, or None. Shorter rows are filled with type 2; only
        rows with types differ in length.
      describe: returns the location of a row of the source, for messages.
      prompt_ids: indices of the rows' prompts, `[c]`; None if the data has no column
        for it.
      values: weights and other numbers of the tokens, `[c, n]`; already checked.
      lengths: lengths of the rows, `[c]`; None if all have `n` tokens.
    """

    start: int
    input_ids: Integer[np.ndarray, "c n"]
    token_types: Integer[np.ndarray, "c n"] | None
    describe: DescribeRow
    prompt_ids: Integer[np.ndarray, "c"] | None = None
    values: TokenValues = TokenValues()
    lengths: Int64[np.ndarray, "c"] | None = None

    def read(self, number: int, tokens: slice) -> Row:
        """Returns some of the tokens of row `number` of the source."""
        place = number - self.start, tokens
        types = None if self.token_types is None else self.token_types[place]
        return Row(
            self.input_ids[place].astype(np.int32),
            None if types is None else types.astype(np.int32),
            self.values.map(operator.itemgetter(place)),
        )


BlockWeights = Callable[[RowBlock], Float32[np.ndarray, "c n"]]
"""Returns the loss weights of a block's tokens, before classes are balanced."""


class Repetition(NamedTuple):
    """Conversations where each answer is learned in a separate example.

    `tokens` are read more than once: they are in examples other than a conversation's
    longest.
    """

    conversations: int = 0
    examples: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return (
            f"{self.conversations:,} conversations are {self.examples:,} examples, one "
            "for each answer, because the chat template changes earlier turns; "
            f"{self.tokens:,} tokens are read more than once"
        )


class RowSource(abc.ABC):
    """Rows that can be read in any order, by several threads.

    Attributes:
      without_completion: number of records left out because their completion is empty,
        or because no answer of a conversation is learned.
    """

    without_completion: int = 0

    @property
    def repetition(self) -> Repetition:
        """The conversations with more than one example."""
        return Repetition()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """Returns one row, trailing padding included."""
        return self.read(number, slice(None))

    @abc.abstractmethod
    def read(self, number: int, tokens: slice) -> Row:
        """Returns some of the tokens of a row."""

    @abc.abstractmethod
    def blocks(self) -> Iterator[RowBlock]:
        """Yields all rows in order, many at a time."""

    @abc.abstractmethod
    def describe(self, number: int) -> str:
        """Returns the location of a row, for messages."""


def rows_per_block(length: int) -> int:
    """Returns how many rows of a length are read at a time."""
    return max(1, min(ROWS_PER_BLOCK, BLOCK_TOKENS // max(length, 1)))
