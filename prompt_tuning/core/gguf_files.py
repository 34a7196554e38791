"""The GGUF container: metadata, and a table of tensors.

A file is `GGUF`, the version, the numbers of tensors and of metadata fields, the
fields, the table of tensors, and from the next multiple of the alignment on the data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). All numbers are little
endian. Counts and lengths are trusted only as far as the file has bytes for them, so a
damaged file costs neither memory nor time.
"""

import contextlib
import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_signatures import format_of
from prompt_tuning.core.typed_json import JsonObject

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
"""Field of the alignment of the tensors."""
DEFAULT_ALIGNMENT = 32
MAXIMUM_AXES = 4
MAXIMUM_FIELDS = 10_000
MAXIMUM_TENSORS = 100_000
MAXIMUM_NAME = 1000
"""Maximum length of the name of a field or a tensor in bytes."""
MAXIMUM_ITEMS = 2**21
"""Maximum length of a list, eight times that of the largest vocabularies."""
MAXIMUM_ELEMENTS = 2**48
"""Maximum number of elements of a tensor."""
MAXIMUM_HEADER = 2**28
"""Maximum size in bytes of everything before the data."""

FLOAT, FLAG, TEXT, LIST = 6, 7, 8, 9
"""Types of metadata."""
FORMATS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", FLOAT: "<f"},
    **{FLAG: "<B", 10: "<Q", 11: "<q", 12: "<d"},
}
"""Format of a number of each type, for `struct`."""


@dataclasses.dataclass(frozen=True)
class BlockType:
    """Type of a tensor, which is stored in blocks of consecutive elements.

    Attributes:
      name: name in llama.cpp.
      size: number of elements of a block.
      bytes: size of a block.
    """

    name: str
    size: int
    bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
}
"""Types of tensors that are read, by their numbers (ggml.h)."""
OTHER_TYPES = {
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 39: "MXFP4", 40: "NVFP4"},
}
"""Names of types that are not read."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in the table of a file.

    Attributes:
      shape: its sizes; consecutive elements of the last axis are neighbors.
      type: type of its blocks.
      begin: offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    type: BlockType
    begin: int

    @property
    def end(self) -> int:
        """Offset just after its last byte."""
        return self.begin + math.prod(self.shape) // self.type.size * self.type.bytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
      path: path of the file.
      metadata: its fields; a list is a Python list.
      tensors: its tensors by name, in the order of the table.
    """

    path: Path
    metadata: JsonObject
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Tests by name or first bytes whether a path is a GGUF file."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a file; remembers the last one.

    Raises:
      InputError: if it is not a complete GGUF file, or has tensors of an unsupported
        type.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file")
    status = path.stat()
    return _read_header(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _read_header(path: Path, changed: int, size: int) -> GgufFile:
    del changed, size  # a file that has changed is read again
    with _mapped(path) as content:
        reader = _Reader(path, content)
        tensors, fields = reader.counts()
        values: dict[str, Any] = {}
        for _ in range(fields):
            name = reader.name("the name of a field")
            if name in values:
                raise InputError(f"{path} has the field {shown(name)} twice")
            values[name] = reader.value(name)
        metadata = JsonObject(str(path), values)
        table = [_TableEntry.read(reader) for _ in range(tensors)]
        return GgufFile(path, metadata, _placed(reader, metadata, table))


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
        if start != MAGIC:
            raise InputError(f"{path} is not a GGUF file: it is {format_of(start)}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content


class _Reader:
    """Reads values one after the other, and never beyond the end of the file.

    Attributes:
      path: path of the file, for messages.
      position: offset of the next byte.
    """

    def __init__(self, path: Path, content: mmap.mmap):
        self.path = path
        self.position = len(MAGIC)
        self._content = content
        self._end = min(len(content), MAXIMUM_HEADER)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return len(self._content)

    def counts(self) -> tuple[int, int]:
        """Reads the version, and returns the numbers of tensors and fields."""
        version = self.number("<I", "the version")
        if version not in VERSIONS:
            big = version & 0xFFFF == 0
            found = "is a big-endian file" if big else f"has version {version}"
            raise InputError(
                f"{self.path} {found}, expected a little-endian file of version "
                f"{' or '.join(map(str, VERSIONS))}: convert the model again by a "
                "current convert_hf_to_gguf.py of llama.cpp"
            )
        tensors = self.number("<Q", "the number of tensors")
        fields = self.number("<Q", "the number of fields")
        for count, limit, what in (
            (tensors, MAXIMUM_TENSORS, "tensors"),
            (fields, MAXIMUM_FIELDS, "fields of metadata"),
        ):
            if count > limit:
                raise InputError(
                    f"{self.path} declares {count:,} {what}, expected at most "
                    f"{limit:,}; the file is damaged: fetch it again"
                )
        return tensors, fields

    def name(self, what: str) -> str:
        return self.text(what, MAXIMUM_NAME)

    def number(self, layout: str, what: str) -> Any:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout), what))
        return value

    def text(self, what: str, maximum: int = MAXIMUM_HEADER) -> str:
        length = self.number("<Q", what)
        if length > maximum:
            raise InputError(
                f"{self.path}: {what} has {length:,} bytes, expected at most "
                f"{maximum:,}; the file is damaged: fetch it again"
            )
        content = self._take(length, what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.path}: {what} is not UTF-8 text: {shown(content)}"
            ) from error

    def value(self, name: str) -> Any:
        what = f"the field {shown(name)}"
        kind = self.number("<I", what)
        if kind == TEXT:
            return self.text(what)
        if kind == LIST:
            return self._list(what)
        number = self.number(self._layout(kind, what), what)
        return _shortest(number) if kind == FLOAT else _typed(kind, number)

    def _list(self, what: str) -> list[Any]:
        kind = self.number("<I", what)
        count = self.number("<Q", what)
        if count > MAXIMUM_ITEMS:
            raise InputError(
                f"{self.path}: {what} is a list of {count:,} values, expected at most "
                f"{MAXIMUM_ITEMS:,}; the file is damaged: fetch it again"
            )
        if kind == TEXT:
            return [self.text(what) for _ in range(count)]
        layout = self._layout(kind, what)
        content = self._take(count * struct.calcsize(layout), what)
        return [_typed(kind, x) for (x,) in struct.iter_unpack(layout, content)]

    def _layout(self, kind: int, what: str) -> str:
        if kind not in FORMATS:
            raise InputError(
                f"{self.path}: {what} has a value of type {kind}, expected a number, "
                "true or false, a text, or a list of such values"
            )
        return FORMATS[kind]

    def _take(self, count: int, what: str) -> bytes:
        begin, self.position = self.position, self.position + count
        if self.position > self._end:
            raise InputError(
                f"{self.path} ends at byte {self._end:,}, within {what}, which begins "
                f"at {begin:,} and has {count:,} bytes; the copy is incomplete or "
                "damaged: fetch it again"
            )
        return self._content[begin : self.position]


def _shortest(number: float) -> float:
    """Returns the shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    layout = FORMATS[FLOAT]
    for digits in range(1, 9):
        rounded = float(f"{number:.{digits}g}")
        with contextlib.suppress(OverflowError):
            if struct.pack(layout, rounded) == struct.pack(layout, number):
                return rounded
    return number


def _typed(kind: int, number: Any) -> Any:
    return bool(number) if kind == FLAG else number


@dataclasses.dataclass(frozen=True)
class _TableEntry:
    """An entry of the table of tensors.

    Attributes:
      name: name of the tensor.
      shape: its sizes.
      type: type of its blocks.
      offset: offset of its first byte in the data.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @classmethod
    def read(cls, reader: _Reader) -> "_TableEntry":
        """Reads an entry.

        Raises:
          InputError: for an unsupported type, or sizes that its blocks do not fill.
        """
        name = reader.name("the name of a tensor")
        what = f"the tensor {shown(name)}"
        axes = reader.number("<I", what)
        if not 1 <= axes <= MAXIMUM_AXES:
            raise InputError(
                f"{reader.path}: {what} has {axes:,} axes, expected 1 to {MAXIMUM_AXES}"
            )
        shape = tuple(reader.number("<Q", what) for _ in range(axes))[::-1]
        if not all(shape) or math.prod(shape) > MAXIMUM_ELEMENTS:
            raise InputError(
                f"{reader.path}: {what} has the shape {shape}, expected sizes of at "
                f"least 1 and at most {MAXIMUM_ELEMENTS:,} elements"
            )
        kind = reader.number("<I", what)
        block = BLOCK_TYPES.get(kind)
        if block is None:
            found = OTHER_TYPES.get(kind, f"number {kind}")
            names = ", ".join(known.name for known in BLOCK_TYPES.values())
            raise InputError(
                f"{reader.path}: {what} has the type {found}, expected one of {names}: "
                "take a file of the model in one of these, such as Q4_K_M or Q8_0, or "
                "write one by llama-quantize from the original model"
            )
        if shape[-1] % block.size:
            raise InputError(
                f"{reader.path}: {what} of the type {block.name} has rows of "
                f"{shape[-1]:,} elements, expected a multiple of {block.size}"
            )
        return cls(name, shape, block, reader.number("<Q", what))


def _placed(
    reader: _Reader, metadata: JsonObject, table: list[_TableEntry]
) -> dict[str, GgufTensor]:
    """Returns the tensors at their places in the file.

    Raises:
      InputError: if tensors share a name, overlap, or lie outside the file.
    """
    alignment = metadata.integer(ALIGNMENT, DEFAULT_ALIGNMENT, minimum=1)
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    end, previous = 0, "the header"
    for entry in sorted(table, key=lambda entry: entry.offset):
        what = f"{reader.path}: the tensor {shown(entry.name)}"
        if entry.name in tensors:
            raise InputError(f"{what} is in its table twice")
        if entry.offset < end or entry.offset % alignment:
            raise InputError(
                f"{what} begins at byte {entry.offset:,} of the data, expected a "
                f"multiple of {alignment} from {end:,} on, where {previous} ends; the "
                "file is damaged: fetch it again"
            )
        tensor = GgufTensor(entry.shape, entry.type, start + entry.offset)
        end, previous = tensor.end - start, shown(entry.name)
        if tensor.end > reader.size:
            raise InputError(
                f"{what} ends at byte {tensor.end:,}, but the file has "
                f"{reader.size:,}; the copy is incomplete: fetch it again"
            )
        tensors[entry.name] = tensor
    return {entry.name: tensors[entry.name] for entry in table}
