"""Reads rows as examples with a text inserted before each prompt."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from prompt_tuning.data.examples import row_readers
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.model_interface import begin_length
from prompt_tuning.data.rows.row_sources import Row, RowBlock


@dataclasses.dataclass(frozen=True)
class ContextRowReader:
    """Reads the examples of another reader, with a text inserted before each.

    The text, `ids`, comes after the `begin_ids` of a row, such as BOS, and is not
    learned.
    """

    reader: row_readers.RowReader
    ids: tuple[int, ...]
    begin_ids: tuple[int, ...]

    @property
    def same_tokens(self) -> bool:
        """See `RowReader`."""
        return self.reader.same_tokens

    def scan(self, block: RowBlock) -> row_readers.ExampleIndex:
        """Returns the other reader's index with longer inputs; see `RowReader`."""
        index = self.reader.scan(block)
        lengths = {"input_lengths": index.input_lengths + len(self.ids)}
        if self.same_tokens:
            lengths["target_lengths"] = index.target_lengths + len(self.ids)
        return dataclasses.replace(index, **lengths)

    def kept(self, token_types: row_readers.TokenTypes) -> row_readers.TokenMask:
        """Returns which tokens are not padding; see `RowReader`."""
        return self.reader.kept(token_types)

    def example(self, row: Row) -> row_readers.Example:
        """Builds the other reader's example and inserts the text; see `RowReader`."""
        example = self.reader.example(row)
        return insert_text(
            example, self.ids, self.begin_ids, same_tokens=self.same_tokens
        )


def insert_text(
    example: row_readers.Example,
    ids: tuple[int, ...],
    begin_ids: tuple[int, ...],
    *,
    same_tokens: bool = True,
) -> row_readers.Example:
    """Inserts a text into an example, after the tokens that begin a row.

    The text is not learned. In a model with `same_tokens` it is among the targets, too.
    """
    inputs = example.inputs
    # If the first token is learned, it is the EOS that ends an example, not BOS.
    position = begin_length(begin_ids, inputs) if example.prefix_length else 0
    inputs = np.insert(inputs, position, np.array(ids, np.int32))
    if not same_tokens:
        return dataclasses.replace(example, inputs=inputs)
    zeros = np.zeros(len(ids), np.float32)
    return dataclasses.replace(
        example,
        inputs=inputs,
        targets=inputs,
        weights=np.insert(example.weights, position, zeros),
        prefix_length=example.prefix_length + len(ids),
        columns={
            name: np.insert(column, position, zeros)
            for name, column in example.columns.items()
        },
    )


class FollowingExamples(Examples):
    """Examples of a decoder-only model, each with a text inserted before its prompt.

    `texts` are the token ids of these texts by example. They come after `begin_ids`,
    the tokens that begin a row, such as BOS.
    """

    def __init__(
        self, table: Examples, texts: Sequence[Sequence[int]], begin_ids: Sequence[int]
    ):
        lengths = np.array([len(text) for text in texts], np.int64)
        self.__dict__.update(table.__dict__)
        self.index = dataclasses.replace(
            table.index,
            input_lengths=table.input_lengths + lengths,
            target_lengths=table.target_lengths + lengths,
        )
        self._table, self._texts = table, texts
        self._begin_ids = tuple(begin_ids)

    def __getitem__(self, number: int) -> row_readers.Example:
        """Returns one example with its text before it."""
        text = tuple(self._texts[number])
        return insert_text(self._table[number], text, self._begin_ids)
