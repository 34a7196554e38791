"""Adds `token_type_ids` to HDF5 files, or replaces them.

The types are written into a copy, which replaces the file once they have been read back
and compared. So the name of the file always refers to the complete old file or to the
complete new one. The rest of the copy has the bytes of the file: nothing reads texts
and lists of foreign files, because HDF5 may loop forever or crash at damage there.
"""

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.atomic_files import sync_path
from prompt_tuning.core.errors import (
    MAXIMUM_SHOWN,
    InputError,
    StorageError,
    is_disk_full,
)
from prompt_tuning.core.numpy_files import read_npy
from prompt_tuning.core.token_weights import COMPLETION, SEPARATOR
from prompt_tuning.data.rows import hdf5_files
from prompt_tuning.data.rows.data_files import Files, list_files
from prompt_tuning.data.rows.hdf5_rows import INPUT_IDS, TOKEN_TYPE_IDS
from prompt_tuning.data.rows.row_sources import rows_per_block
from prompt_tuning.data.tools.type_rules import TypeRule

TYPES = 4
"""Number of token types."""


class TypeCounts(NamedTuple):
    """The token types of one file.

    Attributes:
      path: path of the file.
      rows: number of rows.
      counts: number of tokens by type, `[4]`.
      unlearned: number of rows without a token of type 1 or 3, which cannot be used for
        training.
    """

    path: Path
    rows: int
    counts: Int64[np.ndarray, "4"]
    unlearned: int


def add_token_types(
    files: Files, rule: TypeRule, *, replace: bool = False
) -> list[TypeCounts]:
    """Adds `token_type_ids` to HDF5 files, or replaces them with `replace`.

    Every file is checked before the first is changed. If the rule does not apply to a
    row, its file and all later ones are unchanged. The rule counts rows through all
    files.
    """
    paths = [path.resolve() for path in list_files(files)]
    if len(set(paths)) < len(paths):
        raise InputError(f"a file is named twice: {', '.join(map(str, paths))}")
    rows = [_check_file(path, replace) for path in paths]
    if rule.rows is not None and rule.rows != sum(rows):
        raise InputError(
            f"{rule.source} is for {rule.rows} rows, and {', '.join(map(str, paths))} "
            f"{'has' if len(paths) == 1 else 'have together'} {sum(rows)}: expected "
            "one entry for each row"
        )
    starts = np.cumsum([0, *rows[:-1]]).tolist()
    for path, start in zip(paths, starts, strict=True):
        _check_rule(path, rule, start)
    return [
        _replace_types(path, rule, start)
        for path, start in zip(paths, starts, strict=True)
    ]


def _check_file(path: Path, replace: bool) -> int:
    """Returns the number of rows of a file that types can be added to."""
    with hdf5_files.open_hdf5(path) as file:
        if not hdf5_files.contains(path, file, INPUT_IDS):
            raise InputError(
                f"{path} has the data sets {hdf5_files.list_names(path, file)}, "
                f"expected {INPUT_IDS!r}"
            )
        hdf5_files.check_contents(path, file)
        ids = hdf5_files.open_data_set(path, file, INPUT_IDS)
        if hdf5_files.contains(path, file, TOKEN_TYPE_IDS) and not replace:
            raise InputError(
                f"{path} already has {TOKEN_TYPE_IDS}; --replace replaces them"
            )
        return len(ids)


def _check_rule(path: Path, rule: TypeRule, start: int) -> None:
    """Applies the rule to every row and discards the result."""
    with hdf5_files.open_hdf5(path) as file:
        for first, ids in _blocks(path, file):
            _types(path, rule, start + first, ids)


def _blocks(
    path: Path, file: h5py.File
) -> Iterator[tuple[int, Integer[np.ndarray, "c n"]]]:
    """Yields the first row's number and the token ids of many rows at a time."""
    ids = hdf5_files.open_data_set(path, file, INPUT_IDS)
    count = rows_per_block(ids.shape[1])
    for first in range(0, len(ids), count):
        with hdf5_files.reporting_damage(path, f"rows from {first}"):
            block = ids[first : first + count]
        yield first, block


def _types(
    path: Path, rule: TypeRule, start: int, ids: np.ndarray
) -> Integer[np.ndarray, "c n"]:
    try:
        return rule(ids, start)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _replace_types(path: Path, rule: TypeRule, start: int) -> TypeCounts:
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _reporting_copies(path):
            shutil.copyfile(path, temporary)
            _add_types(path, temporary, rule, start)
            counts = _verify_types(path, temporary, rule, start)
            shutil.copymode(path, temporary)
            sync_path(temporary)
            temporary.replace(path)
            sync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


@contextlib.contextmanager
def _reporting_copies(path: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, StorageError):
        raise
    except OSError as error:
        problem = StorageError if is_disk_full(error) else InputError
        raise problem(
            f"{path}: the copy with types cannot be written next to it ({error}); the "
            "file is unchanged"
        ) from error
    except Exception as error:  # see `reporting_damage`
        raise InputError(
            f"{path} is unchanged, as it is damaged, so that types cannot be added: "
            f"{error}"
        ) from error


def _remove_abandoned(path: Path) -> None:
    """Removes incomplete copies that killed processes left next to a file."""
    for copy in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = copy.name.removesuffix(".tmp").rpartition(".")[2]
        if process.isdecimal() and not _is_running(int(process)):
            copy.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _add_types(path: Path, temporary: Path, rule: TypeRule, start: int) -> None:
    with (
        hdf5_files.open_hdf5(path) as old,
        hdf5_files.open_for_writing(temporary, "r+") as new,
    ):
        ids = hdf5_files.open_data_set(path, old, INPUT_IDS)
        if TOKEN_TYPE_IDS in new:
            del new[TOKEN_TYPE_IDS]
        target = new.create_dataset(
            TOKEN_TYPE_IDS,
            shape=ids.shape,
            dtype="i4",
            compression="gzip",
            chunks=ids.chunks or True,
            maxshape=(None, ids.shape[1]),
        )
        for first, block in _blocks(path, old):
            target[first : first + len(block)] = _types(
                path, rule, start + first, block
            )


def _verify_types(
    path: Path, temporary: Path, rule: TypeRule, start: int
) -> TypeCounts:
    """Reads the copy back, and compares it with the file and the rule."""
    counts, unlearned, rows = np.zeros(TYPES, np.int64), 0, 0
    with hdf5_files.open_hdf5(path) as old, hdf5_files.open_hdf5(temporary) as new:
        written: Any = new[TOKEN_TYPE_IDS]
        copied: Any = new[INPUT_IDS]
        for first, ids in _blocks(path, old):
            block = slice(first, first + len(ids))
            types, expected = written[block], _types(path, rule, start + first, ids)
            if not (np.array_equal(types, expected) and np.all(copied[block] == ids)):
                raise InputError(
                    f"{path}: the copy written next to it is wrong in rows from "
                    f"{first}; is the disk full or failing? The file is unchanged"
                )
            counts += np.bincount(types.ravel(), minlength=TYPES)
            learned = np.isin(types, (COMPLETION, SEPARATOR)).any(axis=1)
            unlearned += int(np.count_nonzero(~learned))
            rows += len(ids)
    return TypeCounts(path, rows, counts, unlearned)


def read_array(file: str | Path, axes: Sequence[str]) -> Integer[np.ndarray, "..."]:
    """Reads an array of integers with the given axes from a `.npy` file."""
    array = read_npy(Path(file))
    if array.dtype.kind not in "iu":
        kind = str(array.dtype)[:MAXIMUM_SHOWN]
        raise InputError(f"{file} contains {kind}, expected an array of integers")
    if array.ndim != len(axes):
        raise InputError(
            f"{file} contains an array of shape {array.shape}, expected "
            f"[{', '.join(axes)}]"
        )
    return array
