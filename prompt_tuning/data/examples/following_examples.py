"""Examples that each follow a text of their own."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from prompt_tuning.data.examples.context_reader import insert_text
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


class FollowingExamples(Examples):
    """Examples of a decoder-only model, each with a text inserted before its prompt.

    Args:
      table: the examples.
      texts: token ids of each example's text.
      begin_ids: ids of the tokens that begin a row, such as BOS, which precede it.
    """

    def __init__(
        self,
        table: Examples,
        texts: Sequence[Sequence[int]],
        begin_ids: Sequence[int],
    ):
        lengths = np.array([len(text) for text in texts], np.int64)
        index = dataclasses.replace(
            table.index,
            input_lengths=table.input_lengths + lengths,
            target_lengths=table.target_lengths + lengths,
        )
        super().__init__(
            table.rows,
            table.reader,
            index,
            table.skipped,
            has_prompt_ids=table.has_prompt_ids,
            columns=table.columns,
            truncation=table.truncation,
            truncated=table.truncated,
            unlearned=table.unlearned,
        )
        self.uncounted = table.uncounted
        self._table, self._texts = table, texts
        self._begin_ids = tuple(begin_ids)

    def __getitem__(self, number: int) -> Example:
        """Returns one example behind its text."""
        text = tuple(self._texts[number])
        return insert_text(self._table[number], text, self._begin_ids)
