"""MessagePack files, of whose arrays nothing is read but where they lie.

A value is one byte that says what it is, then its size or its elements
(https://github.com/msgpack/msgpack/blob/master/spec.md). Flax packs an array as an
extension that holds, packed again, its shape, the name of its dtype, and its bytes in C
order. Of extensions and bytes only the place is kept, so that of a file of many GB
little more than its names is read.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ARRAY_CODES = (1, 3)
"""Flax's extension types of an array and of a NumPy scalar."""

CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    **dict(zip(range(0xCC, 0xD0), (">B", ">H", ">I", ">Q"), strict=True)),
    **dict(zip(range(0xD0, 0xD4), (">b", ">h", ">i", ">q"), strict=True)),
}
BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
LISTS = {0xDC: ">H", 0xDD: ">I"}
MAPS = {0xDE: ">H", 0xDF: ">I"}


class Span(NamedTuple):
    """Bytes of a file.

    Attributes:
      start: the first byte.
      size: how many there are.
      code: the type of an extension; None for plain bytes.
    """

    start: int
    size: int
    code: int | None = None


class PackedFile:
    """A MessagePack file, mapped into memory.

    Attributes:
      data: the file.

    Raises:
      ValueError: for a file that is empty.
    """

    def __init__(self, file: Path):
        with file.open("rb") as opened:
            self.data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)

    def value(self, span: Span | None = None) -> Any:
        """The value that the file holds, or that an extension of it does.

        Returns:
          dicts, lists, texts and numbers; a `Span` for each extension and bytes.

        Raises:
          ValueError: if it is cut short, or no MessagePack.
        """
        start, end = 0, len(self.data)
        if span is not None:
            start, end = span.start, span.start + span.size
        try:
            return _Reader(self.data, start, end).only_value()
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a tree of names: {error!r}") from error


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, place: int, end: int):
        self.data, self.place, self.end = data, place, end

    def only_value(self) -> Any:
        found = self.value()
        if self.place != self.end:
            raise ValueError(f"{self.end - self.place:,} bytes follow its end")
        return found

    def value(self) -> Any:
        start, code = self.place, self.number(">B")
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code < 0xC0:
            return self.short(code)
        if code in CONSTANTS:
            return CONSTANTS[code]
        if code in NUMBERS:
            return self.number(NUMBERS[code])
        if code in FIXED_EXTENSIONS:
            return self.extension(FIXED_EXTENSIONS[code])
        kinds: list[tuple[dict[int, str], Callable[[int], Any]]] = [
            (MAPS, self.map),
            (LISTS, self.list),
            (TEXTS, self.text),
            (BYTES, self.span),
            (EXTENSIONS, self.extension),
        ]
        for sizes, read in kinds:
            if code in sizes:
                return read(self.number(sizes[code]))
        raise ValueError(f"byte {start:,} is {code:#x}, which begins no value")

    def short(self, code: int) -> Any:
        """What has its size in its first byte."""
        if code < 0x90:
            return self.map(code & 0x0F)
        return self.list(code & 0x0F) if code < 0xA0 else self.text(code & 0x1F)

    def map(self, size: int) -> dict:
        return {self.value(): self.value() for _ in range(size)}

    def list(self, size: int) -> list:
        return [self.value() for _ in range(size)]

    def text(self, size: int) -> str:
        span = self.span(size)
        return self.data[span.start : span.start + size].decode()

    def extension(self, size: int) -> Span:
        code = self.number(">b")
        return self.span(size)._replace(code=code)

    def number(self, form: str) -> Any:
        span = self.span(struct.calcsize(form))
        return struct.unpack_from(form, self.data, span.start)[0]

    def span(self, size: int) -> Span:
        span = Span(self.place, size)
        self.place += size
        if self.place > self.end:
            raise ValueError(
                f"it is cut short: {self.place - self.end:,} more bytes were expected"
            )
        return span
