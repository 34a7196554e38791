"""Untrusted files in NumPy's formats, `.npy` and `.npz`.

A header of 200 bytes can declare any number of rows, so sizes are compared with the
file before memory is allocated. Nothing is unpickled.
"""

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_signatures import format_of

MAGIC = b"\x93NUMPY"
MAXIMUM_AXES = 32
"""Maximum number of axes of an array in a file."""
MAXIMUM_SIZE = 2**48
"""Maximum size of an axis: more than file systems store."""
MAXIMUM_HEADER = 10_000
"""Maximum number of bytes of a header, as in NumPy."""


def read_npy(file: Path) -> np.ndarray:
    """Reads an array in NumPy's format.

    Raises:
      InputError: if the file cannot be opened, has another format, holds objects, or
        has fewer bytes than its header declares.
    """
    _check_is_file(file)
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            return _read_array(stream, size, str(file))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{shown(str(file))} cannot be read: {error}") from error


def read_npz(file: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a NumPy archive, by name without `.npy`.

    Raises:
      InputError: if the archive is damaged, compressed or declares more bytes than it
        has, or an array is damaged; see `read_npy`.
    """
    _check_is_file(file)
    try:
        size = file.stat().st_size
        with zipfile.ZipFile(file) as archive:
            check_members(archive, size, file)
            arrays = {}
            for member in archive.infolist():
                with archive.open(member) as stream:
                    source = f"{shown(member.filename)} in {file}"
                    array = _read_array(stream, member.file_size, source)
                    arrays[member.filename.removesuffix(".npy")] = array
    except InputError:
        raise
    # zipfile raises these, and struct.error, for damaged archives.
    except Exception as error:
        raise InputError(
            f"{file} is not an archive of arrays: {shown(str(error))}"
        ) from error
    return arrays


def _check_is_file(file: Path) -> None:
    """Checks that a path is a file; opening a pipe would wait."""
    if not file.is_file():
        reason = "is not a file" if file.exists() else "is missing"
        raise InputError(f"{shown(str(file))} {reason}")


def check_members(archive: zipfile.ZipFile, size: int, file: Path) -> None:
    """Checks that an archive's members are uncompressed and no larger than it.

    Raises:
      InputError: if they are not.
    """
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise InputError(f"{file} is compressed, expected arrays that are stored plain")
    declared = sum(member.file_size for member in members)
    if declared > size:
        raise InputError(
            f"{file} has {size:,} bytes, but declares {declared:,} bytes of arrays; it "
            "is damaged"
        )


def _read_array(stream: Any, size: int, source: str) -> np.ndarray:
    start = stream.read(len(MAGIC))
    if start != MAGIC:
        raise InputError(
            f"{source} is {format_of(start)}, expected a NumPy file (.npy); pickles "
            "are never read"
        )
    stream.seek(0)
    shape, dtype = _read_header(stream, source)
    _check_kind(shape, dtype, source)
    declared = stream.tell() + math.prod(shape) * dtype.itemsize
    if declared > size:
        raise InputError(
            f"{source} has {size:,} bytes, but its header declares {declared:,} for "
            f"{dtype.name}{list(shape)}; it is incomplete or damaged"
        )
    stream.seek(0)
    try:
        return np.lib.format.read_array(stream, allow_pickle=False)
    except (ValueError, EOFError, OverflowError) as error:
        raise InputError(f"{source} cannot be read: {shown(str(error))}") from error


def _read_header(stream: Any, source: str) -> tuple[tuple[int, ...], np.dtype]:
    """Reads shape and dtype, up to where the numbers begin."""
    # NumPy parses the header as Python, and raises anything for a damaged one.
    try:
        major, _ = np.lib.format.read_magic(stream)
        size = int.from_bytes(stream.read(4 if major > 1 else 2), "little")
        if size > MAXIMUM_HEADER:
            raise ValueError(f"it has {size:,} bytes, at most {MAXIMUM_HEADER:,}")
        stream.seek(len(MAGIC) + 2)
        parse = {
            1: np.lib.format.read_array_header_1_0,
            2: np.lib.format.read_array_header_2_0,
        }[major]
        shape, _, dtype = parse(stream)
    except Exception as error:
        raise InputError(
            f"{source} has a damaged header: {shown(str(error))}"
        ) from error
    return shape, dtype


def _check_kind(shape: tuple[int, ...], dtype: np.dtype, source: str) -> None:
    """Checks that a header describes an array of numbers."""
    if dtype.hasobject:
        raise InputError(
            f"{source} contains Python objects, which could run code; pickles are "
            "never read"
        )
    if dtype.fields or dtype.subdtype or not dtype.itemsize:
        raise InputError(f"{source} contains {shown(dtype)}, expected numbers")
    check_shape(shape, source)


def check_shape(shape: Any, source: str) -> tuple[int, ...]:
    """Checks a value that declares the shape of an array.

    Raises:
      InputError: unless it is a few sizes of at least 0.
    """
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > MAXIMUM_AXES
        or any(type(size) is not int or not 0 <= size <= MAXIMUM_SIZE for size in shape)
    ):
        raise InputError(
            f"{source} has the shape {shown(shape)}, expected at most {MAXIMUM_AXES} "
            f"whole numbers from 0 to {MAXIMUM_SIZE:,}"
        )
    return tuple(shape)


def numpy_bytes(array: np.ndarray) -> bytes:
    """Returns an array as the content of an `.npy` file, in C order."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()
