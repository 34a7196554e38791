"""Rows of HDF5 files."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
from jaxtyping import Float32

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.rows import hdf5_files, row_sources, tasks, token_columns
from prompt_tuning.data.rows.data_files import Files, list_files
from prompt_tuning.data.rows.token_columns import LOSS_WEIGHTS, TokenColumns

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"

KEPT_BYTES = 2**26
"""Files whose columns take at most this many bytes are read once, as a whole: HDF5
takes about a hundred times as long to read a row as NumPy to slice it."""


@dataclasses.dataclass(frozen=True)
class Hdf5Table:
    """The open data sets of one file.

    Attributes:
      path: path of the file.
      input_ids: token ids, `[n, length]`.
      columns: other data sets by role: "token_types", "prompt_ids" and the fields of
        `TokenColumns`.
      names: names of the columns' data sets, by role.
    """

    path: Path
    input_ids: h5py.Dataset
    columns: Mapping[str, h5py.Dataset]
    names: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.input_ids)

    def read(self, rows: slice, tokens: slice = slice(None)) -> dict[str, np.ndarray]:
        """Reads all columns, "input_ids" included, of some rows and tokens."""
        if self._whole is not None:
            return self._slice(self._whole, rows, tokens)
        with hdf5_files.reporting_damage(
            self.path, f"rows {rows.start} to {rows.stop - 1}"
        ):
            return self._slice(self._data_sets, rows, tokens)

    @property
    def _data_sets(self) -> dict[str, h5py.Dataset]:
        return {INPUT_IDS: self.input_ids, **self.columns}

    @functools.cached_property
    def _whole(self) -> dict[str, np.ndarray] | None:
        """All columns of a small file, read at their first use; None if it is large."""
        if sum(data.nbytes for data in self._data_sets.values()) > KEPT_BYTES:
            return None
        with hdf5_files.reporting_damage(self.path, f"rows 0 to {len(self) - 1}"):
            return {role: data[()] for role, data in self._data_sets.items()}

    @staticmethod
    def _slice(
        columns: Mapping[str, h5py.Dataset] | Mapping[str, np.ndarray],
        rows: slice,
        tokens: slice,
    ) -> dict[str, np.ndarray]:
        return {
            role: data[rows, tokens] if data.ndim == 2 else data[rows]
            for role, data in columns.items()
        }


def open_table(
    path: Path, prompt_ids: str | None = None, columns: TokenColumns | None = None
) -> Hdf5Table:
    """Opens a file and checks the shapes and types of the data sets to read.

    For the arguments see `Hdf5Rows`.
    """
    file = hdf5_files.open_hdf5(path)
    if not hdf5_files.contains(path, file, INPUT_IDS):
        raise InputError(
            f"{path} has the data sets {hdf5_files.list_names(path, file)}, "
            f"expected {INPUT_IDS!r} and perhaps {TOKEN_TYPE_IDS!r}"
        )
    input_ids = hdf5_files.open_data_set(path, file, INPUT_IDS)
    columns = columns or TokenColumns()
    names = _column_names(path, file, prompt_ids, columns)
    data_sets = {}
    for role, name in names.items():
        axes = ("rows", "length")
        if role in ("prompt_ids", "example_weights"):
            axes = ("rows",)
        elif role in ("balance", *columns.columns):
            axes = None
        is_float = role in (LOSS_WEIGHTS, "example_weights", *columns.columns)
        kinds = "iuf" if is_float else "iu"
        data_sets[role] = hdf5_files.open_data_set(path, file, name, axes, kinds)
        _check_shape(path, name, data_sets[role], input_ids)
    return Hdf5Table(path, input_ids, data_sets, names)


def _column_names(
    path: Path, file: h5py.File, prompt_ids: str | None, columns: TokenColumns
) -> dict[str, str]:
    """Returns the names of the data sets to read, by role."""
    names = {}
    if hdf5_files.contains(path, file, TOKEN_TYPE_IDS):
        names["token_types"] = TOKEN_TYPE_IDS
    if columns.loss_weights and hdf5_files.contains(path, file, LOSS_WEIGHTS):
        names[LOSS_WEIGHTS] = LOSS_WEIGHTS
    # Name and explanation of each column that a setting names.
    required = {
        "prompt_ids": (
            prompt_ids,
            "the task of each row; "
            f"{how_to_set('DataSource.prompt_id_key', 'NAME')} names it (usually "
            f"{tasks.PROMPT_IDS!r})",
        )
    } | {
        role: (key, f"which {setting} names")
        for role, (key, setting) in columns.keys.items()
    }
    for role, (name, explanation) in required.items():
        if name is None:
            continue
        if not hdf5_files.contains(path, file, name):
            raise InputError(
                f"{path} has the data sets {hdf5_files.list_names(path, file)}, "
                f"expected {name!r}, {explanation}"
            )
        names[role] = name
    return names


def _check_shape(
    path: Path, name: str, data: h5py.Dataset, input_ids: h5py.Dataset
) -> None:
    if data.shape == input_ids.shape:
        return
    if data.ndim == 1 and len(data) == len(input_ids):
        return
    if data.ndim == 1:
        raise InputError(
            f"{path}: {name} has {len(data)} rows, expected {len(input_ids)}, as many "
            f"as {INPUT_IDS}"
        )
    raise InputError(
        f"{path}: {name} has shape {data.shape}, expected {input_ids.shape}, the shape "
        f"of {INPUT_IDS}"
    )


def uniform_weights(block: row_sources.RowBlock) -> Float32[np.ndarray, "c n"]:
    """Returns the weights in the data, or 1 for every token if it contains none."""
    return block.values.scale(np.ones(block.input_ids.shape, np.float32))


class Hdf5Rows(row_sources.RowSource):
    """Rows of HDF5 files as generative_data_prep writes them; see `RowSource`.

    A file contains the integer data sets `input_ids [n, length]` and, in all files or
    in none, `token_type_ids` of the same shape. `length` may differ between files. Rows
    are read on demand.

    Args:
      files: path of one file, or a list.
      prompt_ids: name of the integer data set `[n]` that selects the prompts of the
        rows; None for one prompt.
      columns: more columns to read; by default only `loss_weights`.
      weights: computes the loss weights that balance classes of tokens.
    """

    def __init__(
        self,
        files: Files,
        *,
        prompt_ids: str | None = None,
        columns: token_columns.TokenColumns | None = None,
        weights: row_sources.BlockWeights = uniform_weights,
    ):
        self._tables = [open_table(p, prompt_ids, columns) for p in list_files(files)]
        first = self._tables[0]
        for table in self._tables:
            different = set(table.names.values()) ^ set(first.names.values())
            if different:
                raise InputError(
                    f"of {first.path} and {table.path} only one has {min(different)}: "
                    "expected all files to have them, or none"
                )
        # [files]: number of rows up to the end of each file.
        self._ends = np.cumsum([len(table) for table in self._tables], dtype=np.int64)
        self._columns = tuple((columns or token_columns.TokenColumns()).columns)
        self._balance: token_columns.ClassBalance | None = None
        if "balance" in first.columns:
            self._balance = self._compute_balance(weights)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, number: int, tokens: slice) -> row_sources.Row:
        """Returns some of the tokens of a row, trailing padding included.

        Only their chunks of a large file are decompressed.
        """
        table, row = self._locate(number)
        arrays = table.read(slice(row, row + 1), tokens)
        types = arrays.get("token_types")
        return row_sources.Row(
            arrays[INPUT_IDS][0].astype(np.int32),
            None if types is None else types[0].astype(np.int32),
            self._values(arrays).map(lambda values: values[0]),
        )

    def blocks(self) -> Iterator[row_sources.RowBlock]:
        """Yields all rows in order, many of one file at a time."""
        for table, start, arrays in self._read_blocks():
            types = arrays.get("token_types")
            for role in (token_columns.LOSS_WEIGHTS, "example_weights", *self._columns):
                if role in arrays:
                    token_columns.check_column(
                        role,
                        table.names[role],
                        arrays[role],
                        lambda row, start=start: self.describe(start + row),
                        types if arrays[role].ndim == 2 else None,
                    )
            yield self._block(start, arrays)

    def _block(self, start: int, arrays: dict[str, np.ndarray]) -> row_sources.RowBlock:
        types, prompt_ids = arrays.get("token_types"), arrays.get("prompt_ids")
        values = self._values(arrays)
        return row_sources.RowBlock(
            start, arrays[INPUT_IDS], types, self.describe, prompt_ids, values
        )

    def _read_blocks(self) -> Iterator[tuple[Hdf5Table, int, dict[str, np.ndarray]]]:
        """Yields the table, the first row's number and the columns of every block."""
        first = 0
        for table in self._tables:
            count = row_sources.rows_per_block(table.input_ids.shape[1])
            for start in range(0, len(table), count):
                rows = slice(start, min(start + count, len(table)))
                yield table, first + start, table.read(rows)
            first += len(table)

    def _compute_balance(
        self, block_weights: row_sources.BlockWeights
    ) -> token_columns.ClassBalance:
        totals: dict[int, float] = {}
        for _, start, arrays in self._read_blocks():
            classes, weights = arrays["balance"], None
            if classes.ndim == 2:
                try:
                    weights = block_weights(self._block(start, arrays))
                except InputError as error:
                    raise InputError(f"{self.describe(start)}: {error}") from error
            for number, total in token_columns.class_totals(classes, weights).items():
                totals[number] = totals.get(number, 0) + total
        return token_columns.ClassBalance(totals)

    def _values(self, arrays: dict[str, np.ndarray]) -> token_columns.TokenValues:
        factors = {
            name: arrays.get(name)
            for name in (token_columns.LOSS_WEIGHTS, "example_weights")
        }
        if self._balance is not None:
            factors["balance"] = self._balance.weights(arrays["balance"])
        count, length = arrays[INPUT_IDS].shape
        columns = {name: arrays[name] for name in self._columns}
        return token_columns.combine_columns((count, length), factors, columns)

    def describe(self, number: int) -> str:
        """Returns the location of a row, for messages."""
        table, row = self._locate(number)
        return f"{table.path}, row {row}"

    def _locate(self, number: int) -> tuple[Hdf5Table, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        table = int(np.searchsorted(self._ends, number, side="right"))
        start = int(self._ends[table - 1]) if table else 0
        return self._tables[table], number - start
