"""Opens HDF5 files that anybody may have written, without following foreign data.

An HDF5 file can refer to other files (external links, virtual data sets, external
storage) and to code (plugins as filters). We open a data set only if it is in the file
itself and built-in filters can decode it. All access to the library passes through
`reporting_damage`.
"""

import contextlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
from h5py import h5l  # pyright: ignore[reportAttributeAccessIssue]

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError, shown

MAXIMUM_ROW = 2**26
"""Maximum size in bytes of a row of a data set."""

MAXIMUM_CHUNK = 2**28
"""Maximum size in bytes of a chunk, which is decompressed as a whole."""

MAXIMUM_EXPANSION = 1032
"""Maximum number of bytes that DEFLATE unpacks from one byte (RFC 1951)."""

INSPECTED_CHUNK = 2**19
"""Compressed chunks above this many bytes are unpacked within bounds before they are
read: HDF5 itself unpacks whatever a chunk contains, `MAXIMUM_EXPANSION` times as much.
"""

FILTERS = {
    h5py.h5z.FILTER_DEFLATE: "gzip",
    h5py.h5z.FILTER_SHUFFLE: "shuffle",
    h5py.h5z.FILTER_FLETCHER32: "fletcher32",
    h5py.h5z.FILTER_SZIP: "szip",
    h5py.h5z.FILTER_LZF: "lzf",
}
"""Accepted filters. Others are plugins, which HDF5 loads as code when it reads."""

_MAXIMUM_NAMES = 20


@contextlib.contextmanager
def reporting_damage(path: Path, part: str = "") -> Iterator[None]:
    """Reports errors of the HDF5 library within the block as a damaged file."""
    try:
        yield
    except InputError:
        raise
    # h5py derives the exception's class from the library's error stack: a flipped byte
    # raises OSError, KeyError, RuntimeError, ValueError, TypeError and others.
    except Exception as error:
        location = f"{path}, {part}," if part else f"{path}"
        raise InputError(
            f"{location} cannot be read: {_reason(error)}; the file is damaged, write "
            "it again"
        ) from error


@contextlib.contextmanager
def open_for_writing(
    path: Path, mode: str = "w", **options: Any
) -> Iterator[h5py.File]:
    """Opens an HDF5 file for writing ("w"), or to change one of this package ("r+").

    If it cannot be written, this raises an OSError, also where h5py does not.
    """
    try:
        with h5py.File(path, mode, **options) as file:
            yield file
    except (OSError, RuntimeError) as error:
        # A disk that becomes full while a file is closed is a RuntimeError of several
        # lines, with the number of the system's error among them.
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


def open_hdf5(path: Path) -> h5py.File:
    """Opens an HDF5 file for reading."""
    try:
        return h5py.File(path, "r")
    except Exception as error:  # see `reporting_damage`
        raise InputError(
            f"{path} cannot be opened as HDF5 (is it truncated, or of another kind?): "
            f"{_reason(error)}"
        ) from error


def list_names(path: Path, file: h5py.Group) -> str:
    """Returns the names in a file, for messages."""
    with reporting_damage(path):
        names = sorted(str(name) for name in file)
    more = f" and {len(names) - _MAXIMUM_NAMES} more" * (len(names) > _MAXIMUM_NAMES)
    return f"{shown(names[:_MAXIMUM_NAMES])}{more}"


def contains(path: Path, file: h5py.Group, name: str) -> bool:
    """Tests whether a file has an object or a link of a name."""
    with reporting_damage(path):
        parts = _parts(name)
        for count in range(1, len(parts) + 1):
            part = "/".join(parts[:count])
            if not file.id.links.exists(part.encode()):
                return False
            if count < len(parts):
                check_link(path, file, part)
                if not isinstance(file[part], h5py.Group):
                    return False
        return bool(parts)


def check_link(path: Path, file: h5py.Group, name: str) -> None:
    """Refuses a link: an object has to be in the file itself."""
    kind = file.id.links.get_info(name.encode()).type
    if kind != h5l.TYPE_HARD:
        names = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to a file"}
        raise InputError(
            f"{path}: {shown(name)} is {names.get(kind, 'a user-defined link')}, "
            "expected a data set in the file itself: links are not followed, copy the "
            "data into the file"
        )


def open_data_set(
    path: Path,
    file: h5py.File,
    name: str,
    axes: Sequence[str] | None = ("rows", "length"),
    kinds: str = "iu",
) -> h5py.Dataset:
    """Returns a data set of the given axes and NumPy kinds of numbers.

    The file `contains` the name. The axes may be `[rows]` or `[rows, length]` if `axes`
    is None. Data elsewhere, or beyond the limits of this module, is refused.
    """
    with reporting_damage(path, name):
        check_link(path, file, name)
        data = file[name]
        if not isinstance(data, h5py.Dataset):
            raise InputError(f"{path}: {name} is a group, expected a data set")
        # Before the shape, for which a virtual data set opens other files.
        check_storage(path, file, data)
        # The shape is None for HDF5's special form of an empty data set.
        ranks = (1, 2) if axes is None else (len(axes),)
        if len(data.shape or ()) not in ranks or 0 in data.shape:
            accepted = " or ".join(
                f"[{', '.join(('rows', 'length')[:rank] if axes is None else axes)}]"
                for rank in ranks
            )
            raise InputError(
                f"{path}: {name} has shape {data.shape}, expected {accepted}, "
                f"{'both ' if ranks[-1] == 2 else ''}at least 1"
            )
        if data.dtype.kind not in kinds:
            expected = "a number" if "f" in kinds else "an integer type"
            kind = str(data.dtype)[:MAXIMUM_SHOWN]
            raise InputError(f"{path}: {name} has type {kind}, expected {expected}")
    return data


def check_contents(path: Path, file: h5py.File) -> None:
    """Checks all links and data sets; see `check_link` and `check_storage`."""
    names: list[str] = []
    with reporting_damage(path):
        file.visit_links(names.append)
        for name in names:
            check_link(path, file, name)
            member = file[name]
            if isinstance(member, h5py.Dataset):
                check_storage(path, file, member)


def check_storage(path: Path, file: h5py.File, data: h5py.Dataset) -> None:
    """Refuses a data set outside its file, with a plugin, or beyond the limits."""
    name = shown(str(data.name).lstrip("/"))
    elsewhere = "virtual" * data.is_virtual or "stored in other files" * bool(
        data.external
    )
    if elsewhere:
        raise InputError(
            f"{path}: {name} is {elsewhere}, expected a data set in the file itself: "
            "other files are not read, copy the data into the file"
        )
    _check_filters(path, name, data)
    _check_sizes(path, name, data, file.id.get_filesize())
    if data.chunks is not None and data.compression == "gzip":
        _check_chunks(path, name, data)


def _check_filters(path: Path, name: str, data: h5py.Dataset) -> None:
    settings = data.id.get_create_plist()
    codes = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
    foreign = [code for code in codes if code not in FILTERS]
    if foreign:
        raise InputError(
            f"{path}: {name} has the HDF5 filter {foreign[0]}, expected "
            f"{', '.join(FILTERS.values())} or none: write the file again, for example "
            "with gzip"
        )
    if len(set(codes)) < len(codes):
        raise InputError(f"{path}: {name} has a filter twice, expected each once")


def _check_sizes(path: Path, name: str, data: h5py.Dataset, file_bytes: int) -> None:
    shape = data.shape or ()
    size = math.prod(shape) * data.dtype.itemsize
    if size > MAXIMUM_EXPANSION * file_bytes:
        raise InputError(
            f"{path}: {name} has shape {shape}, {size:,} bytes, expected at most "
            f"{MAXIMUM_EXPANSION * file_bytes:,}, {MAXIMUM_EXPANSION:,} times the size "
            "of the file"
        )
    row = math.prod(shape[1:]) * data.dtype.itemsize
    if row > MAXIMUM_ROW:
        raise InputError(
            f"{path}: a row of {name} has {row:,} bytes, expected at most "
            f"{MAXIMUM_ROW:,}"
        )
    chunk = math.prod(data.chunks or ()) * data.dtype.itemsize
    if chunk > MAXIMUM_CHUNK:
        raise InputError(
            f"{path}: a chunk of {name} has {chunk:,} bytes, expected at most "
            f"{MAXIMUM_CHUNK:,}"
        )


def _check_chunks(path: Path, name: str, data: h5py.Dataset) -> None:
    """Refuses large chunks that unpack to more than the size of a chunk."""
    large: list[tuple[int, ...]] = []

    def collect(chunk: h5py.h5d.StoreInfo) -> None:
        if chunk.size > INSPECTED_CHUNK:
            large.append(chunk.chunk_offset)

    data.id.chunk_iter(collect)
    size = math.prod(data.chunks or ()) * data.dtype.itemsize
    for offset in large:
        content = data.id.read_direct_chunk(offset)[1]
        unpacking = zlib.decompressobj()
        # Reading reports a chunk that is not compressed as declared. A checksum may
        # follow the numbers.
        with contextlib.suppress(zlib.error):
            unpacking.decompress(content, size + 4)
            if unpacking.unconsumed_tail and not unpacking.eof:
                raise InputError(
                    f"{path}: a chunk of {name} of {len(content):,} bytes unpacks to "
                    f"more than {size:,}, the size of a chunk"
                )


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
