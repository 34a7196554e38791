"""Arrays of integers in NumPy files, whose headers are checked before they are read."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from jaxtyping import Integer
from numpy.lib import format as npy

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError, shown

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
"""Readers of the versions of the format that arrays of numbers have."""


def read_array(file: str | Path, axes: Sequence[str]) -> Integer[np.ndarray, "..."]:
    """Reads an array of integers from a NumPy file.

    Args:
      file: path of a `.npy` file.
      axes: names of the axes that the array must have, for messages.

    Raises:
      InputError: if the file contains something else, or less than it declares.
    """
    path = Path(file)
    if not path.is_file():
        state = "a folder" if path.is_dir() else "missing"
        raise InputError(f"{shown(str(path))} is {state}, expected a .npy file")
    try:
        with path.open("rb") as opened:
            shape, dtype = _read_header(opened)
            stored = path.stat().st_size - opened.tell()
            _check_header(path, shape, dtype, stored, axes)
        return np.load(path, allow_pickle=False)
    except InputError:
        raise
    # NumPy evaluates the header as a Python literal, which can raise anything.
    except Exception as error:
        raise InputError(f"{file} cannot be read as a .npy file: {error}") from error


def read_archive(file: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file that `numpy.savez` wrote, by name.

    Raises:
      InputError: if the file contains something else, or less than it declares.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                with archive.open(member) as opened:
                    shape, dtype = _read_header(opened)
                    stored = member.compress_size - opened.tell()
                _check_size(Path(file / member.filename), shape, dtype, stored)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except InputError:
        raise
    except Exception as error:  # see `read_array`
        raise InputError(f"{file} cannot be read as a .npz file: {error}") from error


def _read_header(
    opened: IO[bytes] | zipfile.ZipExtFile,
) -> tuple[tuple[int, ...], np.dtype]:
    version = npy.read_magic(opened)
    if version not in _HEADERS:
        raise ValueError(f"its version is {version}, expected (1, 0) or (2, 0)")
    shape, _, dtype = _HEADERS[version](opened)
    return shape, dtype


def _check_header(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    stored: int,
    axes: Sequence[str],
) -> None:
    if dtype.kind not in "iu":
        kind = str(dtype)[:MAXIMUM_SHOWN]
        raise InputError(f"{path} contains {kind}, expected an array of integers")
    if len(shape) != len(axes):
        raise InputError(
            f"{path} contains an array of shape {shown(shape)}, expected "
            f"[{', '.join(axes)}]"
        )
    _check_size(path, shape, dtype, stored)


def _check_size(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, stored: int
) -> None:
    declared = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or declared > stored:
        raise InputError(
            f"{path} declares an array of shape {shown(shape)}, {declared:,} bytes, "
            f"but contains {stored:,}: it is damaged, write it again"
        )
