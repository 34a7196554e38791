"""Rows of token ids and types, from HDF5 files and from files of JSON lines."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import h5py
import numpy as np
from jaxtyping import Int32, Integer

from prompt_tuning.data.tokenizers import Tokenizer, continued_pair, given_ids
from prompt_tuning.errors import InputError
from prompt_tuning.losses.weights import COMPLETION, PADDING, PROMPT, SEPARATOR

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"
ROWS_PER_BLOCK = 1024

Files = str | Path | Sequence[str | Path]
_TypedRow = tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]
PairEncoder = Callable[[Tokenizer, str, str], tuple[list[int], list[int]]]


class Row(NamedTuple):
    """One row: ids `[n]`, and types `[n]` (0 to 3) where the data has them."""

    input_ids: Int32[np.ndarray, "n"]
    token_types: Int32[np.ndarray, "n"] | None


class Block(NamedTuple):
    """Rows `start` to `start + c` as read, before any check of their values.

    Shorter rows are filled with type 2 (only rows that have types differ in length).
    """

    start: int
    input_ids: Integer[np.ndarray, "c n"]
    token_types: Integer[np.ndarray, "c n"] | None


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

    Raises:
      InputError: if a file is missing, cut off, not HDF5, or holds something else.
    """

    def __init__(self, files: Files):
        self._tables = [_open_table(path) for path in file_list(files)]
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
        ids, types = table.read(slice(row, row + 1))
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

    def read(self, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            types = None if self.token_types is None else self.token_types[rows]
            return self.input_ids[rows], types
        except OSError as error:
            raise InputError(
                f"{self.path}, rows {rows.start} to {rows.stop - 1}, cannot be read: "
                f"{error}; the file is damaged, write it again"
            ) from error


def _open_table(path: Path) -> _Table:
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
    if TOKEN_TYPE_IDS not in file:
        return _Table(path, input_ids, None)
    token_types = _checked_data_set(path, file, TOKEN_TYPE_IDS)
    if token_types.shape != input_ids.shape:
        raise InputError(
            f"{path}: {TOKEN_TYPE_IDS} has shape {token_types.shape}, expected that of "
            f"{INPUT_IDS}, {input_ids.shape}"
        )
    return _Table(path, input_ids, token_types)


def _checked_data_set(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    found = file[name]
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"{path}: {name} is a group, expected a data set")
    # An empty data set, a form of its own in HDF5, has the shape None.
    if len(found.shape or ()) != 2 or 0 in found.shape:
        raise InputError(
            f"{path}: {name} has shape {found.shape}, expected [rows, length], "
            "both at least 1"
        )
    if found.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} has type {found.dtype}, expected an integer type"
        )
    return found


class JsonlRows:
    """Pairs of texts, one JSON object to a line, tokenised at opening and kept.

    A row is BOS (type 0) if the tokenizer adds one, the prompt (type 0), the completion
    (type 1) and EOS (type 3). Empty lines are passed over.

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
        """
        if add_eos and tokenizer.eos_id is None:
            raise InputError(
                "the tokenizer names no EOS to close a row with: pass eos_id to "
                "load_tokenizer, or set add_eos=False"
            )
        keys = [completion_key] if prompt_key is None else [prompt_key, completion_key]
        self._rows: list[_TypedRow] = []
        self._places: list[tuple[Path, int]] = []
        for path in file_list(files):
            before = len(self._rows)
            for number, texts in _read_texts(path, keys):
                prompt, completion = texts if len(texts) == 2 else ("", texts[0])
                text = (joiner if prompt else "") + completion
                pair = encode_pair(tokenizer, prompt, text)
                self._rows.append(_pair_row(tokenizer, *pair, add_eos))
                self._places.append((path, number))
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
            yield Block(start, input_ids, token_types)

    def place(self, index: int) -> str:
        """Where row `index` stands, for messages."""
        path, number = self._places[index]
        return f"{path}, line {number}"


def _read_texts(path: Path, keys: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The number (from 1) of each line that is not empty, and its texts."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _line_texts(f"{path}, line {number}", line, keys)


def _line_texts(place: str, line: bytes, keys: list[str]) -> list[str]:
    try:
        content = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{place}: not JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{place}: found a {type(content).__name__}, expected an object with the "
            f"keys {keys}"
        )
    for key in keys:
        if key not in content:
            raise InputError(
                f"{place}: found the keys {sorted(content)}, expected {key!r}; name "
                "the keys with prompt_key and completion_key"
            )
        if not isinstance(content[key], str):
            raise InputError(
                f"{place}: {key!r} is a {type(content[key]).__name__}, expected a "
                "string"
            )
    return [content[key] for key in keys]


def _pair_row(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], add_eos: bool
) -> _TypedRow:
    begin = given_ids(tokenizer, "")
    end = [tokenizer.eos_id] if add_eos else []
    types = [PROMPT] * (len(begin) + len(prompt))
    types += [COMPLETION] * len(completion) + [SEPARATOR] * len(end)
    ids = np.array([*begin, *prompt, *completion, *end], np.int32)
    return ids, np.array(types, np.int32)
