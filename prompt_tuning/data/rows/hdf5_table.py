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
class Table:
    """The open data sets of one file.

    Attributes:
      path: of the file.
      input_ids: `[n, length]`.
      columns: what else is read, by what it is: "token_types", "prompt_ids" and the
        fields of `TokenColumns`.
      names: of the columns' data sets.
    """

    path: Path
    input_ids: h5py.Dataset
    columns: Mapping[str, h5py.Dataset]
    names: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.input_ids)

    def read(self, rows: slice, tokens: slice = slice(None)) -> dict[str, np.ndarray]:
        """The columns of some rows, "input_ids" among them; of some of their tokens.

        Raises:
          InputError: if the file is damaged there.
        """
        try:
            return {
                name: data[rows, tokens] if data.ndim == 2 else data[rows]
                for name, data in {INPUT_IDS: self.input_ids, **self.columns}.items()
            }
        except OSError as error:
            raise InputError(
                f"{self.path}, rows {rows.start} to {rows.stop - 1}, cannot be read: "
                f"{error}; the file is damaged, write it again"
            ) from error


def open_table(
    path: Path, prompt_ids: str | None = None, columns: TokenColumns | None = None
) -> Table:
    """Opens a file and checks the shapes and types of what is read of it.

    Args:
      path: of the file.
      prompt_ids: the data set of each row's prompt; None if there is one prompt.
      columns: what else is read; None for no more than `loss_weights`.

    Raises:
      InputError: if it is cut off, not HDF5, or holds something else.
    """
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
    columns = columns or TokenColumns()
    names = _names(path, file, prompt_ids, columns)
    found = {}
    for role, name in names.items():
        number = role in (LOSS_WEIGHTS, "example_weights", *columns.columns)
        of_rows = role in ("prompt_ids", "example_weights")
        one_axis = len(getattr(file[name], "shape", None) or ()) == 1
        either = role in ("balance", *columns.columns) and one_axis
        axes = ("rows",) if of_rows or either else ("rows", "length")
        found[role] = _checked_data_set(path, file, name, axes, "iuf"[: 2 + number])
        _check_shape(path, name, found[role], input_ids)
    return Table(path, input_ids, found, names)


def _names(
    path: Path, file: h5py.File, prompt_ids: str | None, columns: TokenColumns
) -> dict[str, str]:
    """The data sets that are read, by what they are.

    Raises:
      InputError: if one that is named is not there.
    """
    names = {}
    if TOKEN_TYPE_IDS in file:
        names["token_types"] = TOKEN_TYPE_IDS
    if columns.loss_weights and LOSS_WEIGHTS in file:
        names[LOSS_WEIGHTS] = LOSS_WEIGHTS
    asked = {
        "prompt_ids": (
            prompt_ids,
            "the task of each row; DataSource.prompt_id_key names it (usually "
            f"{PROMPT_IDS!r})",
        )
    } | {
        role: (key, f"which {setting} names")
        for role, (key, setting) in columns.keys.items()
    }
    for role, (name, what) in asked.items():
        if name is None:
            continue
        if name not in file:
            raise InputError(
                f"{path} has the data sets {sorted(file)}, expected {name!r}, {what}"
            )
        names[role] = name
    return names


def _check_shape(
    path: Path, name: str, found: h5py.Dataset, input_ids: h5py.Dataset
) -> None:
    if found.shape == input_ids.shape:
        return
    if found.ndim == 1 and len(found) == len(input_ids):
        return
    if found.ndim == 1:
        raise InputError(
            f"{path}: {name} has {len(found)} rows, expected {len(input_ids)}, as many "
            f"as {INPUT_IDS}"
        )
    raise InputError(
        f"{path}: {name} has shape {found.shape}, expected that of {INPUT_IDS}, "
        f"{input_ids.shape}"
    )


def _checked_data_set(
    path: Path,
    file: h5py.File,
    name: str,
    axes: tuple[str, ...] = ("rows", "length"),
    kinds: str = "iu",
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
    if found.dtype.kind not in kinds:
        wanted = "a number" if "f" in kinds else "an integer type"
        raise InputError(f"{path}: {name} has type {found.dtype}, expected {wanted}")
    return found
