"""Rows of HDF5 files."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows import row_sources, token_columns
from prompt_tuning.data.rows.data_files import Files, list_files
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS, Hdf5Table, open_table


def uniform_weights(block: row_sources.RowBlock) -> Float32[np.ndarray, "c n"]:
    """Returns the weights in the data, or 1 for every token if it contains none."""
    return block.values.scale(np.ones(block.input_ids.shape, np.float32))


class Hdf5Rows:
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

    without_completion = 0
    repetition = row_sources.Repetition()

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

    def __getitem__(self, number: int) -> row_sources.Row:
        """Returns one row, trailing padding included."""
        return self.read(number, slice(None))

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
        return row_sources.RowBlock(start, arrays[INPUT_IDS], types, prompt_ids, values)

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
