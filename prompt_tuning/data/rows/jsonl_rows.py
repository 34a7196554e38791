"""Rows of jsonl files."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.rows.data_files import Files, list_files
from prompt_tuning.data.rows.jsonl import LineEncoder, read_lines
from prompt_tuning.data.rows.row_sources import Row, RowBlock, rows_per_block
from prompt_tuning.data.rows.tasks import Tasks
from prompt_tuning.data.rows.token_columns import (
    ClassBalance,
    TokenColumns,
    TokenValues,
    combine_columns,
)
from prompt_tuning.data.text.tokenizers import Tokenizer, encode_prompt

_TypedRow = tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]


class JsonlRows:
    """Rows of jsonl files, encoded when they are opened; see `RowSource`.

    Each line is an object with a prompt and a completion. Its row consists of BOS (type
    0) if the tokenizer adds one, the prompt (type 0), the completion (type 1) and EOS
    (type 3). Empty lines are skipped.

    Args:
      files: one file or several.
      encoder: encodes the prompt and the completion of a line.
      add_eos: whether to append EOS to each row.
      tasks: how lines select their prompts; None if there is only one prompt.
      columns: further keys to read; none by default.

    Raises:
      InputError: if a file is missing or empty, or a line is not an object with the
        keys and types of values expected.
    """

    def __init__(
        self,
        files: Files,
        encoder: LineEncoder,
        *,
        add_eos: bool = True,
        tasks: Tasks | None = None,
        columns: TokenColumns | None = None,
    ):
        tokenizer, columns = encoder.tokenizer, columns or TokenColumns()
        if add_eos and tokenizer.eos_id is None:
            raise InputError(
                "the tokenizer defines no EOS to end a row with: pass eos_id to "
                "load_tokenizer, or set add_eos=False"
            )
        self._column_names = tuple(columns.columns)
        task_key = None if tasks is None else tasks.key
        self._rows: list[_TypedRow] = []
        self._locations: list[tuple[Path, int]] = []
        self._prompt_ids: list[int] | None = None if task_key is None else []
        self._columns: list[dict[str, Any]] = []
        for path in list_files(files):
            before = len(self._rows)
            for line in read_lines(path):
                self._rows.append(_pair_row(tokenizer, *encoder(line), add_eos))
                self._locations.append((path, line.number))
                self._columns.append(columns.read_line(line))
                if self._prompt_ids is not None and tasks and task_key is not None:
                    task = line.value(task_key, "DataSource.prompt_id_key")
                    self._prompt_ids.append(tasks.parse(task, line.location))
            if len(self._rows) == before:
                raise InputError(f"{path} has no line, expected at least one")
        self._balance_classes()

    def _balance_classes(self) -> None:
        """Replaces the class of each line by the weight of the class."""
        balance = ClassBalance(Counter(row.get("balance", 0) for row in self._columns))
        for row in self._columns:
            if "balance" in row:
                row["balance"] = balance[row["balance"]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        """Returns one row."""
        return self.read(number, slice(None))

    def read(self, number: int, tokens: slice) -> Row:
        """Returns some of the tokens of a row."""
        ids, types = (array[tokens] for array in self._rows[number])
        values = self._values(slice(number, number + 1), len(ids))
        return Row(ids, types, values.map(lambda values: values[0]))

    def blocks(self) -> Iterator[RowBlock]:
        """Yields all rows in order, many at a time."""
        longest = max(len(ids) for ids, _ in self._rows)
        count = rows_per_block(longest)
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
            yield RowBlock(start, input_ids, token_types, prompt_ids, values, lengths)

    def _values(self, rows: slice, length: int) -> TokenValues:
        """Returns the weights and columns of some rows, for each of their tokens."""
        selected = self._columns[rows]
        factors = {
            name: np.array([row[name] for row in selected]) for name in selected[0]
        }
        columns = {name: factors.pop(name) for name in self._column_names}
        return combine_columns((len(selected), length), factors, columns)

    def describe(self, number: int) -> str:
        """Returns the location of a row, for messages."""
        path, line = self._locations[number]
        return f"{path}, line {line}"


def _pair_row(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], add_eos: bool
) -> _TypedRow:
    """Returns the ids and types of a row."""
    begin = encode_prompt(tokenizer, "")
    end = [tokenizer.eos_id] if add_eos else []
    types = [PROMPT] * (len(begin) + len(prompt))
    types += [COMPLETION] * len(completion) + [SEPARATOR] * len(end)
    ids = np.array([*begin, *prompt, *completion, *end], np.int32)
    return ids, np.array(types, np.int32)
