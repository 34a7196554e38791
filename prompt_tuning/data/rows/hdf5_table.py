"""The data sets of one HDF5 file of rows, opened and checked."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.tasks import PROMPT_IDS
from prompt_tuning.data.rows.token_columns import (
    LOSS_WEIGHTS,
    TokenColumns,
)

INPUT_IDS = "input_ids"
TOKEN_TYPE_IDS = "token_type_ids"


@dataclasses.dataclass(frozen=True)
class Hdf5Table:
    """The open data sets of one file.

    Attributes:
      path: path of the file.
      input_ids: token ids, `[n, length]`.
      columns: further data sets by role: "token_types", "prompt_ids" and the fields of
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
        """Reads all columns, "input_ids" included, of some rows and tokens.

        Raises:
          InputError: if this part of the file is damaged.
        """
        try:
            return {
                role: data[rows, tokens] if data.ndim == 2 else data[rows]
                for role, data in {INPUT_IDS: self.input_ids, **self.columns}.items()
            }
        except OSError as error:
            raise InputError(
                f"{self.path}, rows {rows.start} to {rows.stop - 1}, cannot be read: "
                f"{error}; the file is damaged, write it again"
            ) from error


def open_hdf5(path: Path) -> h5py.File:
    """Opens an HDF5 file for reading.

    Raises:
      InputError: if it is truncated or not HDF5.
    """
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened as HDF5 (is it truncated, or of another kind?): "
            f"{error}"
        ) from error


def open_table(
    path: Path, prompt_ids: str | None = None, columns: TokenColumns | None = None
) -> Hdf5Table:
    """Opens a file and checks the shapes and types of the data sets to read.

    Args:
      path: path of the file.
      prompt_ids: name of the data set of each row's task; None if there is only one
        prompt.
      columns: further columns to read; by default only `loss_weights`.

    Raises:
      InputError: if it is truncated, not HDF5, or has other data sets.
    """
    file = open_hdf5(path)
    if INPUT_IDS not in file:
        raise InputError(
            f"{path} has the data sets {sorted(file)}, expected {INPUT_IDS!r} and "
            f"perhaps {TOKEN_TYPE_IDS!r}"
        )
    input_ids = _check_data_set(path, file, INPUT_IDS)
    columns = columns or TokenColumns()
    names = _column_names(path, file, prompt_ids, columns)
    data_sets = {}
    for role, name in names.items():
        per_row = role in ("prompt_ids", "example_weights")
        if role in ("balance", *columns.columns):
            per_row = len(getattr(file[name], "shape", None) or ()) == 1
        axes = ("rows",) if per_row else ("rows", "length")
        is_float = role in (LOSS_WEIGHTS, "example_weights", *columns.columns)
        kinds = "iuf" if is_float else "iu"
        data_sets[role] = _check_data_set(path, file, name, axes, kinds)
        _check_shape(path, name, data_sets[role], input_ids)
    return Hdf5Table(path, input_ids, data_sets, names)


def _column_names(
    path: Path, file: h5py.File, prompt_ids: str | None, columns: TokenColumns
) -> dict[str, str]:
    """Returns the names of the data sets to read, by role.

    Raises:
      InputError: if one that a setting names is missing.
    """
    names = {}
    if TOKEN_TYPE_IDS in file:
        names["token_types"] = TOKEN_TYPE_IDS
    if columns.loss_weights and LOSS_WEIGHTS in file:
        names[LOSS_WEIGHTS] = LOSS_WEIGHTS
    # Name and explanation of each column that a setting names.
    required = {
        "prompt_ids": (
            prompt_ids,
            "the task of each row; DataSource.prompt_id_key names it (usually "
            f"{PROMPT_IDS!r})",
        )
    } | {
        role: (key, f"which {setting} names")
        for role, (key, setting) in columns.keys.items()
    }
    for role, (name, explanation) in required.items():
        if name is None:
            continue
        if name not in file:
            raise InputError(
                f"{path} has the data sets {sorted(file)}, expected {name!r}, "
                f"{explanation}"
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


def _check_data_set(
    path: Path,
    file: h5py.File,
    name: str,
    axes: tuple[str, ...] = ("rows", "length"),
    kinds: str = "iu",
) -> h5py.Dataset:
    """Returns a data set of the given axes and NumPy kinds of numbers."""
    data = file[name]
    if not isinstance(data, h5py.Dataset):
        raise InputError(f"{path}: {name} is a group, expected a data set")
    # The shape is None for HDF5's special form of an empty data set.
    if len(data.shape or ()) != len(axes) or 0 in data.shape:
        raise InputError(
            f"{path}: {name} has shape {data.shape}, expected [{', '.join(axes)}], "
            f"{'both ' if len(axes) == 2 else ''}at least 1"
        )
    if data.dtype.kind not in kinds:
        expected = "a number" if "f" in kinds else "an integer type"
        raise InputError(f"{path}: {name} has type {data.dtype}, expected {expected}")
    return data
