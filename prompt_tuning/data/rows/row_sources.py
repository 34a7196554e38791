"""Rows of token ids and types, from HDF5 files and from files of JSON lines."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS, Table, open_table
from prompt_tuning.data.rows.jsonl import LinePairs, PairEncoder, read_lines
from prompt_tuning.data.rows.tasks import Tasks
from prompt_tuning.data.rows.token_columns import (
    LOSS_WEIGHTS,
    Balance,
    TokenColumns,
    TokenValues,
    check_column,
    class_weights,
    token_values,
)
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair, given_ids

ROWS_PER_BLOCK = 1024

Files = str | Path | Sequence[str | Path]
_TypedRow = tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]


class Row(NamedTuple):
    """One row: ids `[n]`, and types `[n]` (0 to 3) where the data has them.

    `values` are what else it says of each token, `[n]`.
    """

    input_ids: Int32[np.ndarray, "n"]
    token_types: Int32[np.ndarray, "n"] | None
    values: TokenValues = TokenValues()


class RowBlock(NamedTuple):
    """Rows `start` to `start + c` as read, before any check of their values.

    Shorter rows are filled with type 2 (only rows that have types differ in length).
    `prompt_ids` say which prompt each row has, where the data has a column of them.
    `values` are what else it says of each token, `[c, n]`; these were checked.
    `lengths` are those of the rows; None where all have `n` tokens.
    """

    start: int
    input_ids: Integer[np.ndarray, "c n"]
    token_types: Integer[np.ndarray, "c n"] | None
    prompt_ids: Integer[np.ndarray, "c"] | None = None
    values: TokenValues = TokenValues()
    lengths: Int64[np.ndarray, "c"] | None = None


Weigh = Callable[[RowBlock], Float32[np.ndarray, "c n"]]
"""Says what each token of some rows weighs, before classes are balanced."""


@runtime_checkable
class RowSource(Protocol):
    """A table of rows that can be read in any order, by several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`, trailing padding included."""
        ...

    def part(self, index: int, tokens: slice) -> Row:
        """Some tokens of row `index`."""
        ...

    def blocks(self) -> Iterator[RowBlock]:
        """Every row in order, many at a time, for the scan at opening."""
        ...

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        ...


def learned_alike(block: RowBlock) -> Float32[np.ndarray, "c n"]:
    """Every token weighs what the data says of it, and 1 where that is nothing."""
    return block.values.weighted(np.ones(block.input_ids.shape, np.float32))


def file_list(files: Files) -> list[Path]:
    """One file or several, as paths that exist.

    Raises:
      InputError: if there is none, or one is missing.
    """
    several = [files] if isinstance(files, str | Path) else list(files)
    paths = [Path(file) for file in several]
    if not paths:
        raise InputError("data files: the list is empty, expected at least one file")
    for path in paths:
        if not path.is_file():
            what = "a folder" if path.is_dir() else "missing"
            raise InputError(f"data file {path} is {what}, expected a file")
    return paths


class Hdf5Rows:
    """Rows of HDF5 files as generative_data_prep writes them.

    Each file holds the integer data sets `input_ids [n, length]` and, in all files or
    in none, `token_type_ids` of the same shape. `length` may differ between files.
    Rows are read when they are asked for.

    Args:
      files: one file or several.
      prompt_ids: the integer data set `[n]` of each row's prompt; None if there is one
        prompt.
      columns: what else is read, `loss_weights` alone if None.
      weigh: what tokens weigh, for classes of tokens to be balanced by it.

    Raises:
      InputError: if a file is missing, cut off, not HDF5, or holds something else.
    """

    def __init__(
        self,
        files: Files,
        *,
        prompt_ids: str | None = None,
        columns: TokenColumns | None = None,
        weigh: Weigh = learned_alike,
    ):
        self._tables = [open_table(p, prompt_ids, columns) for p in file_list(files)]
        first = self._tables[0]
        for table in self._tables:
            odd = set(table.names.values()) ^ set(first.names.values())
            if odd:
                raise InputError(
                    f"of {first.path} and {table.path} only one has {min(odd)}: "
                    "expected all files to have them, or none"
                )
        self._ends = np.cumsum([len(table) for table in self._tables], dtype=np.int64)
        self._columns = tuple((columns or TokenColumns()).columns)
        self._balance: Balance | None = None
        if "balance" in first.columns:
            self._balance = self._balanced(weigh)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        """Row `index`, trailing padding included."""
        return self.part(index, slice(None))

    def part(self, index: int, tokens: slice) -> Row:
        """Some tokens of row `index`; the chunks of others are not unpacked."""
        table, row = self._locate(index)
        read = table.read(slice(row, row + 1), tokens)
        types = read.get("token_types")
        return Row(
            read[INPUT_IDS][0].astype(np.int32),
            None if types is None else types[0].astype(np.int32),
            self._values(read).map(lambda values: values[0]),
        )

    def blocks(self) -> Iterator[RowBlock]:
        """Every row in order, `ROWS_PER_BLOCK` at a time within each file."""
        for table, start, read in self._read():
            types = read.get("token_types")
            for role in (LOSS_WEIGHTS, "example_weights", *self._columns):
                if role in read:
                    of_tokens = types if read[role].ndim == 2 else None
                    check_column(
                        role,
                        table.names[role],
                        read[role],
                        lambda row, start=start: self.place(start + row),
                        of_tokens,
                    )
            yield self._block(start, read)

    def _block(self, start: int, read: dict[str, np.ndarray]) -> RowBlock:
        types, prompt_ids = read.get("token_types"), read.get("prompt_ids")
        return RowBlock(start, read[INPUT_IDS], types, prompt_ids, self._values(read))

    def _read(self) -> Iterator[tuple[Table, int, dict[str, np.ndarray]]]:
        """All columns of some rows of a table, and the number of the first."""
        first = 0
        for table in self._tables:
            for start in range(0, len(table), ROWS_PER_BLOCK):
                rows = slice(start, min(start + ROWS_PER_BLOCK, len(table)))
                yield table, first + start, table.read(rows)
            first += len(table)

    def _balanced(self, weigh: Weigh) -> Balance:
        """The weights of the classes, counted over all files."""
        totals: dict[int, float] = {}
        for _, start, read in self._read():
            classes, weights = read["balance"], None
            if classes.ndim == 2:
                try:
                    weights = weigh(self._block(start, read))
                except InputError as error:
                    raise InputError(f"{self.place(start)}: {error}") from error
            for kind, total in class_weights(classes, weights).items():
                totals[kind] = totals.get(kind, 0) + total
        return Balance(totals)

    def _values(self, read: dict[str, np.ndarray]) -> TokenValues:
        factors = {name: read.get(name) for name in (LOSS_WEIGHTS, "example_weights")}
        if self._balance is not None:
            factors["balance"] = self._balance.of(read["balance"])
        count, length = read[INPUT_IDS].shape
        columns = {name: read[name] for name in self._columns}
        return token_values((count, length), factors, columns)

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        table, row = self._locate(index)
        return f"{table.path}, row {row}"

    def _locate(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        return self._tables[number], index - start


class JsonlRows:
    """Pairs of texts, one JSON object to a line, tokenised at opening and kept.

    A row is BOS (type 0) if the tokenizer adds one, the prompt (type 0), the completion
    (type 1) and EOS (type 3). Empty lines are passed over. What is given is the text
    under a key, or a template that takes texts of the line.

    Raises:
      InputError: if a file is missing, empty, or a line is not an object that has the
        keys with strings.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: Tokenizer,
        *,
        prompt_key: str | None = "prompt",
        completion_key: str = "completion",
        joiner: str = "",
        add_eos: bool = True,
        encode_pair: PairEncoder = continued_pair,
        template: TokenTemplate | None = None,
        tasks: Tasks | None = None,
        columns: TokenColumns | None = None,
    ):
        """Reads the files.

        Args:
          files: one file or several.
          tokenizer: from text to ids.
          prompt_key: key of the given text; None where there is none.
          completion_key: key of the text to learn.
          joiner: put before the completion where there is a prompt; both texts are
            otherwise taken as they are.
          add_eos: whether EOS closes the row.
          encode_pair: the ids of a prompt and its completion: `continued_pair` for one
            text in two parts, `separate_pair` for two texts.
          template: what is given, in place of the text under `prompt_key`.
          tasks: where a line says which prompt it has; None if there is one prompt.
          columns: what else a line says; nothing if None.
        """
        if add_eos and tokenizer.eos_id is None:
            raise InputError(
                "the tokenizer names no EOS to close a row with: pass eos_id to "
                "load_tokenizer, or set add_eos=False"
            )
        pair = LinePairs(
            tokenizer, prompt_key, completion_key, joiner, encode_pair, template
        )
        self._rows: list[_TypedRow] = []
        self._places: list[tuple[Path, int]] = []
        self._prompt_ids: list[int] | None = (
            None if tasks is None or tasks.key is None else []
        )
        self._said: list[dict[str, Any]] = []
        columns = columns or TokenColumns()
        self._columns = tuple(columns.columns)
        for path in file_list(files):
            before = len(self._rows)
            for line in read_lines(path):
                self._rows.append(_pair_row(tokenizer, *pair(line), add_eos))
                self._places.append((path, line.number))
                self._said.append(columns.of_line(line))
                if self._prompt_ids is not None and tasks and tasks.key is not None:
                    value = line.value(tasks.key, "DataSource.prompt_id_key")
                    self._prompt_ids.append(tasks.number(value, line.place))
            if len(self._rows) == before:
                raise InputError(f"{path} has no line, expected at least one")
        balance = Balance(Counter(said.get("balance", 0) for said in self._said))
        for said in filter(lambda said: "balance" in said, self._said):
            said["balance"] = balance[said["balance"]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Row `index`."""
        return self.part(index, slice(None))

    def part(self, index: int, tokens: slice) -> Row:
        """Some tokens of row `index`."""
        ids, types = (each[tokens] for each in self._rows[index])
        values = self._values(slice(index, index + 1), len(ids))
        return Row(ids, types, values.map(lambda values: values[0]))

    def blocks(self) -> Iterator[RowBlock]:
        """Every row in order, `ROWS_PER_BLOCK` at a time."""
        for start in range(0, len(self), ROWS_PER_BLOCK):
            rows = self._rows[start : start + ROWS_PER_BLOCK]
            shape = len(rows), max(len(ids) for ids, _ in rows)
            input_ids = np.zeros(shape, np.int32)
            token_types = np.full(shape, PADDING, np.int32)
            for place, (ids, types) in enumerate(rows):
                input_ids[place, : len(ids)] = ids
                token_types[place, : len(ids)] = types
            prompt_ids = None
            if self._prompt_ids is not None:
                stop = start + len(rows)
                prompt_ids = np.array(self._prompt_ids[start:stop], np.int64)
            values = self._values(slice(start, start + len(rows)), shape[1])
            lengths = np.array([len(ids) for ids, _ in rows], np.int64)
            yield RowBlock(start, input_ids, token_types, prompt_ids, values, lengths)

    def _values(self, rows: slice, length: int) -> TokenValues:
        """What lines say of themselves, for each of their tokens."""
        said = self._said[rows]
        factors = {name: np.array([one[name] for one in said]) for name in said[0]}
        columns = {name: factors.pop(name) for name in self._columns}
        return token_values((len(said), length), factors, columns)

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        path, number = self._places[index]
        return f"{path}, line {number}"


def _pair_row(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], add_eos: bool
) -> _TypedRow:
    begin = given_ids(tokenizer, "")
    end = [tokenizer.eos_id] if add_eos else []
    types = [PROMPT] * (len(begin) + len(prompt))
    types += [COMPLETION] * len(completion) + [SEPARATOR] * len(end)
    ids = np.array([*begin, *prompt, *completion, *end], np.int32)
    return ids, np.array(types, np.int32)
