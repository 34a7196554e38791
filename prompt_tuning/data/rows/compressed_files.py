"""Text files compressed with gzip or Zstandard, decompressed within limits."""

import contextlib
import gzip
import importlib
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError

MAXIMUM_SIZE = 2**31
"""Maximum size in bytes of a decompressed file."""

_GZIP_READ = 2**20
_ZSTD_READ = 2**11
"""Compressed bytes that are decompressed at a time. 4 bytes of Zstandard stand for at
most 128 KiB (RFC 8878), so that each step needs at most 64 MiB."""

COMPRESSIONS = (".gz", ".zst")


def compression_of(path: Path) -> str | None:
    """Returns the suffix of a file's compression; None if it is not compressed."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def content_suffix(path: Path) -> str:
    """Returns the suffix that tells the kind of a file's content, in small letters."""
    name = path if compression_of(path) is None else path.with_suffix("")
    suffix = name.suffix.lower()
    return ".jsonl" if suffix == ".ndjson" else suffix


@contextlib.contextmanager
def open_content(path: Path) -> Iterator[io.BufferedIOBase]:
    """Opens a file, which may be compressed, as a stream of its content.

    A damaged or truncated file is an InputError, also while the stream is read; so is
    content larger than `MAXIMUM_SIZE`.
    """
    compression = compression_of(path)
    with path.open("rb") as stored:
        if compression is None:
            yield stored
            return
        chunks = CHUNKS[compression](path, stored)
        with io.BufferedReader(_Content(path, chunks)) as stream:
            yield stream


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[Path]:
    """Yields a file with the content of one that may be compressed."""
    if compression_of(path) is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as folder:
        plain = Path(folder) / path.with_suffix("").name
        write_content(path, plain)
        yield plain


def write_content(path: Path, target: Path) -> None:
    """Writes the content of a file, which may be compressed, to another file."""
    with open_content(path) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


class _Content(io.RawIOBase):
    def __init__(self, path: Path, chunks: Iterator[bytes]):
        super().__init__()
        self._path, self._chunks = path, chunks
        self._pending = memoryview(b"")
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer; returns the number of bytes, 0 at the end."""
        while not self._pending:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._size += len(chunk)
            if self._size > MAXIMUM_SIZE:
                raise InputError(
                    f"{self._path} has more than {MAXIMUM_SIZE:,} bytes after "
                    "decompression, expected at most as many: decompress it, and give "
                    "the plain file"
                )
            self._pending = memoryview(chunk)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count


def _gzip_chunks(path: Path, stored: Any) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=stored) as stream:
            while chunk := stream.read1(_GZIP_READ):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, "gzip", error) from error


def _zstd_chunks(path: Path, stored: Any) -> Iterator[bytes]:
    create, problem = _zstd_decompressor(path)
    decompressor: Any = None
    pending = b""
    while pending or (pending := stored.read(_ZSTD_READ)):
        decompressor = decompressor or create()
        try:
            chunk = decompressor.decompress(pending)
        except problem as error:
            raise _damaged(path, "Zstandard", error) from error
        pending = b""
        if decompressor.eof:
            # Another frame may follow.
            pending, decompressor = decompressor.unused_data, None
        if chunk:
            yield chunk
    if decompressor is not None:
        raise _damaged(path, "Zstandard", "it is truncated")


def _zstd_decompressor(path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    """Returns a factory of decompressors of one frame, and their error."""
    with contextlib.suppress(ImportError):
        module: Any = importlib.import_module("compression.zstd")
        return module.ZstdDecompressor, module.ZstdError
    try:
        module = importlib.import_module("zstandard")
    except ImportError as error:
        raise InputError(
            f"{path} is compressed with Zstandard, which Python reads from version "
            "3.14 on: install the module with pip install zstandard, or decompress "
            "the file with zstd -d"
        ) from error
    return (lambda: module.ZstdDecompressor().decompressobj()), module.ZstdError


def _damaged(path: Path, kind: str, reason: Exception | str) -> InputError:
    return InputError(
        f"{path} cannot be decompressed as {kind}: {reason}; it is damaged, or of "
        "another kind than its name says"
    )


CHUNKS: dict[str, Callable[[Path, Any], Iterator[bytes]]] = {
    ".gz": _gzip_chunks,
    ".zst": _zstd_chunks,
}
"""Functions that yield the content of a file, by the suffix of its compression."""
