"""Rows of files of text."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.core.token_weights import PADDING
from prompt_tuning.data.rows import row_sources, text_records, token_columns
from prompt_tuning.data.rows.data_files import Files, list_files
from prompt_tuning.data.rows.jsonl import JsonLine, RowEncoder, TypedRow
from prompt_tuning.data.rows.tasks import Tasks

RecordEdit = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns a record as it is to be encoded."""

LINES = 256
"""Number of lines that are encoded at a time."""


class JsonlRows(row_sources.RowSource):
    """Rows of files of text, encoded when they are opened; see `RowSource`.

    The row of a line with a prompt and a completion consists of BOS (type 0) if the
    tokenizer adds one, the prompt (type 0), the completion (type 1) and EOS (type 3).
    Empty lines are skipped. Lines with an empty completion, or no learned answer, are
    left out, as `prepare` leaves them out, because only EOS would be learned.

    Attributes:
      records: numbers of the rows' records, counted through all files.
      without_completion: see `RowSource`.

    Args:
      files: path of one file, or a list.
      encoder: encodes lines.
      add_eos: whether to append EOS to every row.
      tasks: how lines select their prompts; None for one prompt.
      columns: more keys to read; none by default.
      edit: changes the records before they are encoded.
    """

    def __init__(
        self,
        files: Files,
        encoder: RowEncoder,
        *,
        add_eos: bool = True,
        tasks: Tasks | None = None,
        columns: token_columns.TokenColumns | None = None,
        edit: RecordEdit | None = None,
    ):
        if add_eos and encoder.tokenizer.eos_id is None:
            raise InputError(
                "the tokenizer defines no EOS to end a row with, nor does the model's "
                "config: give its number by "
                f"{how_to_set('Pretrained.eos_id', NUMBER)}, "
                f"or end rows without one by {how_to_set('DataSource.add_eos', False)}"
            )
        columns = columns or token_columns.TokenColumns()
        self._column_names = tuple(columns.columns)
        self._rows: list[TypedRow] = []
        self._locations: list[tuple[Path, str]] = []
        has_key = tasks is not None and tasks.key is not None
        self._prompt_ids: list[int] | None = [] if has_key else None
        self._columns: list[dict[str, Any]] = []
        self.records: list[int] = []
        read = 0
        for path in list_files(files):
            before, first = len(self._rows), read
            records = edited_records(path, edit)
            while block := list(itertools.islice(records, LINES)):
                chosen = [i for i, x in enumerate(block) if encoder.has_completion(x)]
                lines = [block[i] for i in chosen]
                several = encoder.rows(lines, add_eos) if lines else []
                for i, line, rows in zip(chosen, lines, several, strict=True):
                    self._rows += rows
                    count = len(rows)
                    self.records += [read + i] * count
                    self._locations += [(path, x) for x in _places(line, count)]
                    self._columns += [columns.read_line(line) for _ in rows]
                    if self._prompt_ids is not None and tasks is not None:
                        self._prompt_ids += [tasks.read_line(line)] * count
                read += len(block)
            if read == first:
                raise InputError(f"{path} has no line, expected at least one")
            if len(self._rows) == before:
                raise InputError(
                    f"{path}: no record has a completion, or it is empty in all "
                    f"{read - first:,}, so there is nothing to learn: write "
                    "completions, or name another key by "
                    f"{how_to_set('DataSource.completion_key', 'KEY')}"
                )
        self.without_completion = read - len(set(self.records))
        self._balance_classes()

    @property
    def repetition(self) -> row_sources.Repetition:
        """See `RowSource`."""
        records = np.array(self.records)
        lengths = np.array([len(ids) for ids, _ in self._rows])
        _, first, counts = np.unique(records, return_index=True, return_counts=True)
        repeated = lengths.sum() - np.maximum.reduceat(lengths, first).sum()
        several = counts[counts > 1]
        return row_sources.Repetition(len(several), int(several.sum()), int(repeated))

    def _balance_classes(self) -> None:
        """Replaces the class of every line by the weight of the class."""
        balance = token_columns.ClassBalance(
            Counter(row.get("balance", 0) for row in self._columns)
        )
        for row in self._columns:
            if "balance" in row:
                row["balance"] = balance[row["balance"]]

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, number: int, tokens: slice) -> row_sources.Row:
        """Returns some of the tokens of a row."""
        ids, types = (array[tokens] for array in self._rows[number])
        values = self._values(slice(number, number + 1), len(ids))
        return row_sources.Row(ids, types, values.map(lambda values: values[0]))

    def blocks(self) -> Iterator[row_sources.RowBlock]:
        """Yields all rows in order, many at a time."""
        longest = max(len(ids) for ids, _ in self._rows)
        count = row_sources.rows_per_block(longest)
        for start in range(0, len(self), count):
            rows = self._rows[start : start + count]
            shape = len(rows), max(len(ids) for ids, _ in rows)
            input_ids = np.zeros(shape, np.int32)
            token_types = np.full(shape, PADDING, np.int32)
            for offset, (ids, types) in enumerate(rows):
                input_ids[offset, : len(ids)] = ids
                token_types[offset, : len(ids)] = types
            prompt_ids = None
            if self._prompt_ids is not None:
                stop = start + len(rows)
                prompt_ids = np.array(self._prompt_ids[start:stop], np.int64)
            values = self._values(slice(start, start + len(rows)), shape[1])
            lengths = np.array([len(ids) for ids, _ in rows], np.int64)
            yield row_sources.RowBlock(
                *(start, input_ids, token_types, self.describe),
                *(prompt_ids, values, lengths),
            )

    def _values(self, rows: slice, length: int) -> token_columns.TokenValues:
        """Returns the weights and columns of some rows, for all of their tokens."""
        selected = self._columns[rows]
        factors = {
            name: np.array([row[name] for row in selected]) for name in selected[0]
        }
        columns = {name: factors.pop(name) for name in self._column_names}
        return token_columns.combine_columns((len(selected), length), factors, columns)

    def describe(self, number: int) -> str:
        """Returns the location of a row, for messages."""
        path, line = self._locations[number]
        return f"{path}, {line}"


def edited_records(path: Path, edit: RecordEdit | None) -> Iterator[JsonLine]:
    """Yields the records of a file as they are to be encoded."""
    for record in text_records.read_records(path):
        if edit is not None:
            with record.locating_errors():
                content = edit(record.content)
            record = dataclasses.replace(record, content=content)
        yield record


def _places(line: JsonLine, count: int) -> list[str]:
    place = f"{line.unit} {line.number}"
    if count == 1:
        return [place]
    return [f"{place} (answer {i} of {count})" for i in range(1, count + 1)]
