"""The column that tells which text a teacher reads before each example."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.rows import text_records, token_columns
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.data.rows.row_sources import RowSource
from prompt_tuning.data.text.tokenizers import Tokenizer

TEXT, IDS = "text", "ids"
"""Keys of a context in a file: its text, or its token ids instead of the text."""

ContextText = str | tuple[int, ...]
"""A text, or its token ids."""


class ContextColumn:
    """The column that numbers the contexts of examples.

    Attributes:
      key: jsonl key, or HDF5 data set `[rows]`.
      contexts: the contexts by number, as they are first read if the column has texts.

    Args:
      key: as above.
      table: the contexts, or a jsonl file with a `text` or `ids` in every line; None if
        the column has the texts themselves.
    """

    def __init__(self, key: str, table: Sequence[str] | str | None):
        self.key, self._has_table = key, table is not None
        self.contexts: list[ContextText] = []
        if isinstance(table, str):
            self.contexts += map(_read_context, text_records.read_records(Path(table)))
        elif table is not None:
            self.contexts += table
        if self._has_table and not all(self.contexts or [""]):
            raise InputError(
                "ContextDistillation.contexts has no text, or an empty one: give the "
                "texts that examples are read after"
            )
        self._numbers: dict[str, int] = {}

    def edit(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces a text of the column by its number."""
        value = record.get(self.key)
        if self._has_table or value is None:
            return dict(record)
        if not isinstance(value, str) or not value:
            raise InputError(
                f"{self.key!r} is {shown(value)}, expected a text: name the file that "
                "numbers are the lines of with ContextDistillation.contexts"
            )
        number = self._numbers.setdefault(value, len(self.contexts))
        if number == len(self.contexts):
            self.contexts.append(value)
        return {**record, self.key: number}

    def number(self, line: JsonLine) -> int:
        """Returns the number of the context of a line."""
        line = dataclasses.replace(line, content=self.edit(line.content))
        value = line.scalar(self.key, "ContextDistillation.context_key")
        if type(value) is not int or not 0 <= value < len(self.contexts):
            raise InputError(f"{line.location}: {self._error(value)}")
        return value

    def check(self, rows: RowSource) -> None:
        """Refuses rows without the number of a context."""
        for block in rows.blocks():
            numbers = block.values.columns[token_columns.CONTEXTS][:, 0]
            wrong = (numbers < 0) | (numbers >= len(self.contexts))
            wrong |= numbers % 1 != 0
            if wrong.any():
                row = int(np.argmax(wrong))
                error = self._error(float(numbers[row]))
                raise InputError(f"{block.describe(block.start + row)}: {error}")

    def _error(self, value: object) -> str:
        count = len(self.contexts)
        return (
            f"{self.key!r} is {shown(value)}, expected the number of one of "
            f"{count} contexts, 0 to {count - 1} (ContextDistillation.contexts)"
        )

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the token ids of all contexts."""
        return [
            tokenizer.encode(context) if isinstance(context, str) else list(context)
            for context in self.contexts
        ]


def _read_context(record: Any) -> ContextText:
    content = record.content
    ids = content.get(IDS)
    if ids is None:
        return record.text(TEXT, "ContextDistillation.contexts")
    whole = isinstance(ids, list) and all(type(x) is int and x >= 0 for x in ids)
    if not whole:
        raise InputError(
            f"{record.location}: {IDS!r} is {shown(ids)}, expected a list of token ids"
        )
    return tuple(ids)
