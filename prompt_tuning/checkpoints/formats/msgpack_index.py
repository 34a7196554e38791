"""Index of a MessagePack file: its tree of names, and where its arrays are stored.

Flax stores an array as an extension that contains, packed again, its shape, the name of
its dtype, and its bytes in C order. The `msgpack` library decodes everything except the
headers of byte strings and extensions, which we decode here. The library returns their
content as a copy, so even a streaming `Unpacker` with an `ext_hook` reads the whole
file (measured with one array of 1 GiB: 6 s and 2 GiB of memory; indexing it here takes
0.2 ms and reads a few bytes). Nothing in a file is executed.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

ARRAY_CODES = (1, 3)
"""Flax's extension types for an array and a NumPy scalar."""

# By first byte: format of the size that follows, or the size itself.
# https://github.com/msgpack/msgpack/blob/master/spec.md
BYTE_STRINGS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}
LISTS = {*range(0x90, 0xA0), 0xDC, 0xDD}
WINDOW = 256
"""Bytes given to the library at first for one value; more for a longer text."""
MAXIMUM_TEXT = WINDOW * 16**3
"""Maximum size of a text in bytes."""
MAXIMUM_VALUES = 200_000
"""Maximum number of values in a file; the largest T5 has 20,000."""
MAXIMUM_DEPTH = 100


class Span(NamedTuple):
    """Range of bytes in a file.

    `code` is the type of an extension; None for a byte string.
    """

    start: int
    size: int
    code: int | None = None


class PackedFile:
    """A MessagePack file, mapped into memory.

    Raises:
      ValueError: if the file is empty.
    """

    def __init__(self, file: Path):
        with file.open("rb") as opened:
            self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = 0

    def value(self, span: Span | None = None) -> Any:
        """Decodes the value in the file, or the value packed in one of its extensions.

        Returns dicts, lists, texts and numbers, with a `Span` for each extension and
        byte string.

        Raises:
          ValueError: if the data is cut short, is not MessagePack or exceeds a limit.
        """
        start, end = 0, len(self.data)
        if span is not None:
            start, end = span.start, span.start + span.size
        self._values = 0
        try:
            value, start = self._value(start, end, 0)
        except TypeError as error:
            raise ValueError(f"not a tree of names: {error!r}") from error
        if start != end:
            raise ValueError(f"{end - start:,} bytes follow its end")
        return value

    def _value(self, start: int, end: int, depth: int) -> tuple[Any, int]:
        """Decodes the value at an offset; returns it with the offset after it."""
        self._values += 1
        if self._values > MAXIMUM_VALUES:
            raise ValueError(f"it has more than {MAXIMUM_VALUES:,} values")
        if depth > MAXIMUM_DEPTH:
            raise ValueError(f"it is nested more than {MAXIMUM_DEPTH} levels deep")
        code = self.data[start] if start < end else None
        if code in BYTE_STRINGS or code in EXTENSIONS or code in FIXED_EXTENSIONS:
            span = self._span(start, end)
            return span, span.start + span.size
        if code in MAPS:
            count, start = self._decode("read_map_header", start, end)
            tree = {}
            for _ in range(count):
                key, start = self._value(start, end, depth + 1)
                tree[key], start = self._value(start, end, depth + 1)
            return tree, start
        if code in LISTS:
            count, start = self._decode("read_array_header", start, end)
            values = []
            for _ in range(count):
                value, start = self._value(start, end, depth + 1)
                values.append(value)
            return values, start
        return self._decode("unpack", start, end)

    def _decode(self, method: str, start: int, end: int) -> tuple[Any, int]:
        """Calls a method of an `Unpacker` at an offset, as `_value` does."""
        size = WINDOW
        while True:
            window = self.data[start : min(start + size, end)]
            unpacker = msgpack.Unpacker(max_buffer_size=0)
            unpacker.feed(window)
            try:
                return getattr(unpacker, method)(), start + unpacker.tell()
            except msgpack.OutOfData as error:
                if start + size >= end:
                    message = f"it is cut short: byte {start:,} begins a longer value"
                    raise ValueError(message) from error
                if size >= MAXIMUM_TEXT:
                    message = f"a text of over {size:,} bytes begins at {start:,}"
                    raise ValueError(message) from error
                size *= 16
            except msgpack.FormatError as error:
                message = f"byte {start:,} is {window[0]:#x}, which begins no value"
                raise ValueError(message) from error

    def _span(self, start: int, end: int) -> Span:
        """Decodes the header of a byte string or an extension."""
        code, kind = self.data[start], None
        start += 1
        size = FIXED_EXTENSIONS.get(code)
        try:
            if size is None:
                form = (BYTE_STRINGS | EXTENSIONS)[code]
                (size,) = struct.unpack_from(form, self.data, start)
                start += struct.calcsize(form)
            if code not in BYTE_STRINGS:
                (kind,) = struct.unpack_from(">b", self.data, start)
                start += 1
        except struct.error as error:
            raise ValueError(f"it is cut short: {error}") from error
        if start + size > end:
            missing = start + size - end
            raise ValueError(f"it is cut short: {missing:,} more bytes were expected")
        return Span(start, size, kind)
