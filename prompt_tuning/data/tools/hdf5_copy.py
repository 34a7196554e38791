"""Copies of HDF5 files without their token types, for `token_type_files`.

Values of variable length (most texts, and lists of varying length) are in a part of the
file that the HDF5 library reads without checking it: damage there makes it loop forever
or crash. So a file that has such values is copied and compared in a process with
limits, and no other code reads such values of a foreign file.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from prompt_tuning.core.errors import InputError, StorageError, is_disk_full
from prompt_tuning.core.limited_process import run_limited
from prompt_tuning.data.rows import hdf5_files
from prompt_tuning.data.rows.hdf5_table import TOKEN_TYPE_IDS
from prompt_tuning.data.rows.row_sources import rows_per_block

MINIMUM_SECONDS = 4
"""Computing time that copying and comparing a file of variable length may each take."""

BYTES_PER_SECOND = 2**22
"""Size of the file that adds a second to it."""


def copy_others(path: Path, temporary: Path) -> None:
    """Creates a copy of a file without its token types."""
    _run(_copy_others, path, temporary)


def check_others(path: Path, temporary: Path) -> None:
    """Compares a file with its copy, except for their token types."""
    _run(_check_others, path, temporary)


@contextlib.contextmanager
def reporting_copies(path: Path) -> Iterator[None]:
    """Reports errors within the block as a file that cannot be copied with types."""
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
        raise InputError(f"{_problem(path)}: {error}") from error


def not_equal(path: Path, difference: str) -> InputError:
    """Returns the error for a copy that differs from its file."""
    return InputError(
        f"{path}: the copy written next to it is wrong ({difference}); is the disk "
        "full or failing? The file is unchanged"
    )


def _problem(path: Path) -> str:
    return (
        f"{path} is unchanged, as it is damaged or has objects that cannot be copied "
        "with types"
    )


def _run(function: Callable[[Path, Path], None], path: Path, temporary: Path) -> None:
    """Calls a function, in another process if values have variable length."""
    if not _has_variable_lengths(path):
        function(path, temporary)
        return
    seconds = MINIMUM_SECONDS + path.stat().st_size // BYTES_PER_SECOND
    run_limited(function, path, temporary, seconds=seconds, problem=_problem(path))


def _has_variable_lengths(path: Path) -> bool:
    with hdf5_files.open_hdf5(path) as file, hdf5_files.reporting_damage(path):
        names = ["/"]
        file.visit(names.append)
        return any(dtype.hasobject for name in names for dtype in _dtypes(file[name]))


def _dtypes(member: Any) -> Iterator[np.dtype]:
    """Yields the types of an object's values and attributes; reads no value."""
    if isinstance(member, h5py.Dataset):
        yield member.dtype
    for name in member.attrs:
        yield member.attrs.get_id(name).dtype


def _copy_others(path: Path, temporary: Path) -> None:
    with (
        reporting_copies(path),
        hdf5_files.open_hdf5(path) as old,
        hdf5_files.open_for_writing(temporary) as new,
    ):
        for name, value in old.attrs.items():
            new.attrs[name] = value
        for name in old:
            if name != TOKEN_TYPE_IDS:
                old.copy(name, new)


def _check_others(path: Path, temporary: Path) -> None:
    with (
        reporting_copies(path),
        hdf5_files.open_hdf5(path) as old,
        hdf5_files.open_hdf5(temporary) as new,
    ):
        copied = {str(name) for name in old if name != TOKEN_TYPE_IDS}
        if set(new) != {*copied, TOKEN_TYPE_IDS}:
            raise not_equal(path, f"it has the data sets {sorted(new)}")
        _check_attributes(path, old, new)
        for name in sorted(copied):
            _check_copy(path, old[name], new[name])


def _check_copy(path: Path, old: Any, new: Any) -> None:
    """Compares a data set, or a group with all its members, with its copy."""
    _check_attributes(path, old, new)
    if isinstance(old, h5py.Group):
        names: list[str] = []
        copied: list[str] = []
        old.visit(names.append)
        new.visit(copied.append)
        if names != copied:
            raise not_equal(path, f"{old.name} contains {copied}, expected {names}")
        for name in names:
            if isinstance(old[name], h5py.Dataset):
                _check_values(path, old[name], new[name])
            _check_attributes(path, old[name], new[name])
    elif isinstance(old, h5py.Dataset):
        _check_values(path, old, new)


def _check_values(path: Path, old: Any, new: Any) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise not_equal(path, f"{old.name} has shape {new.shape}, type {new.dtype}")
    is_scalar = not old.shape
    row = math.prod((old.shape or ())[1:]) * old.dtype.itemsize // 8
    count = rows_per_block(row)
    for first in range(0, 1 if is_scalar else len(old), count):
        part = () if is_scalar else slice(first, first + count)
        if not _same(old[part], new[part]):
            raise not_equal(path, f"{old.name} differs in rows from {first}")


def _check_attributes(path: Path, old: Any, new: Any) -> None:
    if set(old.attrs) != set(new.attrs):
        raise not_equal(path, f"{old.name} has the attributes {sorted(new.attrs)}")
    for name, value in old.attrs.items():
        if not _same(value, new.attrs[name]):
            raise not_equal(path, f"the attribute {name} of {old.name} differs")


def _same(old: Any, new: Any) -> bool:
    """Tests whether two HDF5 values are equal bit for bit, so that NaN equals NaN."""
    if isinstance(old, (h5py.Reference, h5py.RegionReference)):
        return True  # Addresses within each file may differ.
    if isinstance(old, h5py.Empty):
        return isinstance(new, h5py.Empty) and old.dtype == new.dtype
    first, second = np.asarray(old), np.asarray(new)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.dtype.names is not None:
        return all(_same(first[name], second[name]) for name in first.dtype.names)
    if not first.dtype.hasobject:
        return first.tobytes() == second.tobytes()
    if not first.ndim:
        return first.item() == second.item()
    return all(map(_same, first.flat, second.flat))
