"""Rows of token ids and types, from HDF5 files and from files of JSON lines."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import h5py
import numpy as np
from jaxtyping import Int32, Integer

from prompt_tuning.data.lines import LinePairs, PairEncoder, read_lines
from prompt_tuning.data.tasks import PROMPT_IDS, Tasks
from prompt_tuning.data.templates import TokenTemplate
from prompt_tuning.data.tokenizers import Tokenizer, continued_pair, given_ids
from prompt_tuning.errors import InputError
from prompt_tuning.losses.weights import COMPLETION, PADDING, PROMPT, SEPARATOR

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"
ROWS_PER_BLOCK = 1024

Files = str | Path | Sequence[str | Path]
_Column = np.ndarray | None
_TypedRow = tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]


class Row(NamedTuple):
    """One row: ids `[n]`, and types `[n]` (0 to 3) where the data has them."""

    input_ids: Int32[np.ndarray, "n"]
    token_types: Int32[np.ndarray, "n"] | None


class Block(NamedTuple):
    """Rows `start` to `start + c` as read, before any check of their values.

    Shorter rows are filled with type 2 (only rows that have types differ in length).
    `prompt_ids` say which prompt each row has, where the data has a column of them.
    """

    start: int
    input_ids: Integer[np.ndarray, "c n"]
    token_types: Integer[np.ndarray, "c n"] | None
    prompt_ids: Integer[np.ndarray, "c"] | None = None


@runtime_checkable
class Rows(Protocol):
    """A table of rows that can be read in any order, by several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`, trailing padding included."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Every row in order, many at a time, for the scan at opening."""
        ...

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        ...


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

    Raises:
      InputError: if a file is missing, cut off, not HDF5, or holds something else.
    """

    def __init__(self, files: Files, *, prompt_ids: str | None = None):
        self._tables = [_open_table(path, prompt_ids) for path in file_list(files)]
        self._has_types = self._tables[0].token_types is not None
        for table in self._tables:
            if (table.token_types is not None) != self._has_types:
                raise InputError(
                    f"of {self._tables[0].path} and {table.path} only one has "
                    f"{TOKEN_TYPE_IDS}: expected all files to have them, or none"
                )
        sizes = [len(table.input_ids) for table in self._tables]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        """Row `index`, trailing padding included."""
        table, row = self._locate(index)
        ids, types, _ = table.read(slice(row, row + 1))
        return Row(
            ids[0].astype(np.int32),
            None if types is None else types[0].astype(np.int32),
        )

    def blocks(self) -> Iterator[Block]:
        """Every row in order, `ROWS_PER_BLOCK` at a time within each file."""
        first = 0
        for table in self._tables:
            size = len(table.input_ids)
            for start in range(0, size, ROWS_PER_BLOCK):
                rows = slice(start, min(start + ROWS_PER_BLOCK, size))
                yield Block(first + start, *table.read(rows))
            first += size

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        table, row = self._locate(index)
        return f"{table.path}, row {row}"

    def _locate(self, index: int) -> tuple["_Table", int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[number - 1]) if number else 0
        return self._tables[number], index - start


@dataclasses.dataclass(frozen=True)
class _Table:
    """The open data sets of one HDF5 file."""

    path: Path
    input_ids: h5py.Dataset
    token_types: h5py.Dataset | None
    prompt_ids: h5py.Dataset | None

    def read(self, rows: slice) -> tuple[np.ndarray, _Column, _Column]:
        """Ids, types and prompts of some rows; None where there are none."""
        types, prompts = self.token_types, self.prompt_ids
        try:
            return (
                self.input_ids[rows],
                None if types is None else types[rows],
                None if prompts is None else prompts[rows],
            )
        except OSError as error:
            raise InputError(
                f"{self.path}, rows {rows.start} to {rows.stop - 1}, cannot be read: "
                f"{error}; the file is damaged, write it again"
            ) from error


def _open_table(path: Path, prompt_ids: str | None) -> _Table:
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened as HDF5 (is it cut off, or of another kind?): "
            f"{error}"
        ) from error
    if INPUT_IDS not in file:
        raise InputError(
            f"{path} has the data sets {sorted(file)}, expected {INPUT_IDS!r} and "
            f"perhaps {TOKEN_TYPE_IDS!r}"
        )
    input_ids = _checked_data_set(path, file, INPUT_IDS)
    token_types = None
    if TOKEN_TYPE_IDS in file:
        token_types = _checked_data_set(path, file, TOKEN_TYPE_IDS)
        if token_types.shape != input_ids.shape:
            raise InputError(
                f"{path}: {TOKEN_TYPE_IDS} has shape {token_types.shape}, expected "
                f"that of {INPUT_IDS}, {input_ids.shape}"
            )
    if prompt_ids is None:
        return _Table(path, input_ids, token_types, None)
    return _Table(
        path, input_ids, token_types, _prompt_ids(path, file, prompt_ids, input_ids)
    )


def _prompt_ids(
    path: Path, file: h5py.File, name: str, input_ids: h5py.Dataset
) -> h5py.Dataset:
    if name not in file:
        raise InputError(
            f"{path} has the data sets {sorted(file)}, expected {name!r}, the task of "
            f"each row; DataSource.prompt_id_key names it (usually {PROMPT_IDS!r})"
        )
    found = _checked_data_set(path, file, name, ("rows",))
    if len(found) != len(input_ids):
        raise InputError(
            f"{path}: {name} has {len(found)} rows, expected {len(input_ids)}, as many "
            f"as {INPUT_IDS}"
        )
    return found


def _checked_data_set(
    path: Path,
    file: h5py.File,
    name: str,
    axes: tuple[str, ...] = ("rows", "length"),
) -> h5py.Dataset:
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{path}: {name} is a group, expected a data set")
    # An empty data set, a form of its own in HDF5, has the shape None.
    if len(found.shape or ()) != len(axes) or 0 in found.shape:
        raise InputError(
            f"{path}: {name} has shape {found.shape}, expected [{', '.join(axes)}], "
            f"{'both ' if len(axes) == 2 else ''}at least 1"
        )
    if found.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} has type {found.dtype}, expected an integer type"
        )
    return found


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
        for path in file_list(files):
            before = len(self._rows)
            for line in read_lines(path):
                self._rows.append(_pair_row(tokenizer, *pair(line), add_eos))
                self._places.append((path, line.number))
                if self._prompt_ids is not None and tasks and tasks.key is not None:
                    value = line.value(tasks.key, "DataSource.prompt_id_key")
                    self._prompt_ids.append(tasks.number(value, line.place))
            if len(self._rows) == before:
                raise InputError(f"{path} has no line, expected at least one")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Row `index`."""
        return Row(*self._rows[index])

    def blocks(self) -> Iterator[Block]:
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
            yield Block(start, input_ids, token_types, prompt_ids)

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
