"""The data sets of one HDF5 file of rows, opened and checked."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.rows import hdf5_files
from prompt_tuning.data.rows.tasks import PROMPT_IDS
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
            f"{PROMPT_IDS!r})",
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
