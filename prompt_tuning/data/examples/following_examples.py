"""Examples that each follow a text, e.g. of their teacher."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from prompt_tuning.data.examples.context_reader import insert_text
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


class FollowingExamples(Examples):
    """Examples of a decoder-only model, each with a text inserted before its prompt.

    `texts` are the token ids of these texts by example. They come after `begin_ids`,
    the tokens that begin a row, such as BOS.
    """

    def __init__(
        self,
        table: Examples,
        texts: Sequence[Sequence[int]],
        begin_ids: Sequence[int],
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

    def __getitem__(self, number: int) -> Example:
        """Returns one example with its text before it."""
        text = tuple(self._texts[number])
        return insert_text(self._table[number], text, self._begin_ids)
