"""The safetensors format: files mapped into memory, or written array by array.

A file is the length `N` of its header (8 bytes, little endian), the header (`N` bytes
of JSON: name -> dtype, shape, offsets) and the data
(https://github.com/huggingface/safetensors, "Format"). We parse the header here, so
that the error for a damaged file gives both sizes, and so that an array, or a block of
one, is a view of the file until it is cast: only the pages of the file that contain the
block are read.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.file_names import check_links, check_name
from prompt_tuning.core.file_signatures import format_of
from prompt_tuning.core.numpy_files import MAXIMUM_SIZE, check_shape
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json, read_object

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Ends of names in folders that were converted from TensorFlow (the first BERTs), and
what transformers calls them since, which are read in their place."""
LENGTH_BYTES, ALIGNMENT = 8, 8
METADATA = "__metadata__"
MAXIMUM_ARRAYS = 100_000
"""Maximum number of arrays in a file."""
MAXIMUM_NAME = 1000
"""Maximum length of an array's name, which messages and reports print."""
MAXIMUM_HEADER = 100_000_000
"""Maximum length of a header in bytes, as in the `safetensors` library."""


def open_safetensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Opens the arrays in a folder, in one file or more.

    As in Hugging Face libraries, `model.safetensors` has priority over the files that
    `model.safetensors.index.json` names; without either, all `*.safetensors` are read.
    Scales and biases of norms with outdated names get today's (`OLD_NAMES`).

    Raises:
      InputError: for a folder or file that is missing, cut short or in another format,
        a name that is in two files, an index with missing files or names, or a link out
        of the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected one with *.safetensors")
    check_links(folder, "*.safetensors", INDEX)
    index = folder / INDEX
    if (folder / "model.safetensors").exists():
        return _open_files([folder / "model.safetensors"])
    if index.exists():
        return _open_indexed(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise InputError(
            f"{folder} has no *.safetensors, only {shortened(found)}; other formats of "
            "weights are not supported (a *.bin is a pickle, which can run code): if "
            "you trust them, convert them with transformers by AutoModelForCausalLM."
            f"from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)"
        )
    return _open_files(files)


def _open_files(files: list[Path]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for stored_name, tensor in read_header(file).items():
            name = _present_name(stored_name)
            if name in stored:
                raise InputError(
                    f"{name} is in both {stored[name].source} and {file}; keep the "
                    "files of one checkpoint in the folder, or their index"
                )
            stored[name] = tensor
    return stored


def _open_indexed(index: Path) -> dict[str, StoredTensor]:
    content = read_object(index)
    if type(content.value("weight_map", None)) is not dict:
        raise InputError(f"{index} has no 'weight_map' of tensor names to files")
    weight_map = content.nested("weight_map").values
    texts = {file if type(file) is str else None for file in weight_map.values()}
    if None in texts:
        content.refuse("weight_map", "texts by name")
    files = sorted(check_name(file, str(index)) for file in texts)
    for file in files:
        if Path(file).name != file or not (index.parent / file).is_file():
            raise InputError(
                f"{index} names {shown(file)}, which is not a file in {index.parent}; "
                f"the checkpoint has {len(files)} files: download all of them"
            )
    stored = _open_files([index.parent / file for file in files])
    for name, file in weight_map.items():
        if _present_name(name) not in stored:
            raise InputError(f"{index} lists {shown(name)} in {file}, which lacks it")
    return stored


def _present_name(name: str) -> str:
    """Returns transformers' current name of an array; see `OLD_NAMES`."""
    old = next((old for old in OLD_NAMES if name.endswith(old)), None)
    return name if old is None else name.removesuffix(old) + OLD_NAMES[old]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Opens the arrays in one file.

    Raises:
      InputError: if the file is not a complete safetensors file by the rules of the
        `safetensors` library: arrays have distinct names and fill the file without gaps
        and overlaps.
    """
    header, start = _header(file)
    entries = dict(header.values)
    if any(type(x) is not str for x in header.nested(METADATA, {}).values.values()):
        header.refuse(METADATA, "texts by name")
    entries.pop(METADATA, None)
    if not entries:
        raise InputError(f"{file} contains no tensors")
    if len(entries) > MAXIMUM_ARRAYS:
        raise InputError(
            f"{file} has {len(entries):,} arrays, expected at most {MAXIMUM_ARRAYS:,}"
        )
    arrays = {name: _array(file, name, entry) for name, entry in entries.items()}
    end = max(array.end for array in arrays.values())
    if file.stat().st_size != start + end:
        raise InputError(
            f"{file} has {file.stat().st_size:,} bytes, but its header describes "
            f"{start + end:,}; the copy is incomplete or damaged: fetch it again"
        )
    _check_contiguous(file, arrays)
    return {name: array.stored(file, start) for name, array in arrays.items()}


def _header(file: Path) -> tuple[JsonObject, int]:
    """Returns the header, and the offset of the data."""
    if not file.is_file():
        raise InputError(f"{file} is not a file")
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        start = LENGTH_BYTES + length
        if size <= LENGTH_BYTES or opened.read(1) != b"{":
            raise InputError(
                f"{file} ({size:,} bytes) is not a safetensors file: it is "
                f"{format_of(first)}"
            )
        if start > size:
            raise InputError(
                f"{file} has {size:,} bytes, but its header alone ends at {start:,}; "
                "the copy is incomplete: fetch it again"
            )
        if length > MAXIMUM_HEADER:
            raise InputError(
                f"{file} has a header of {length:,} bytes, expected at most "
                f"{MAXIMUM_HEADER:,}"
            )
        opened.seek(LENGTH_BYTES)
        content = parse_json(opened.read(length), str(file), distinct_names=True)
        return as_object(content, str(file)), start


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def stored(self, file: Path, start: int) -> StoredTensor:
        """Returns the array, given the offset at which the file's data starts."""
        begin = start + self.begin
        read = functools.partial(_read, file, begin, self.dtype, self.shape)
        return StoredTensor(self.shape, self.dtype, str(file), read)


def _array(file: Path, name: str, value: Any) -> _Array:
    source = f"{shown(name)} in {file}"
    if len(name) > MAXIMUM_NAME:
        raise InputError(f"{source} is a name of more than {MAXIMUM_NAME} characters")
    if not isinstance(value, dict):
        raise InputError(f"{source} is an invalid header entry: {shown(value)}")
    entry = JsonObject(source, value)
    dtype_name = entry.text("dtype")
    if dtype_name not in DTYPES:
        entry.refuse("dtype", f"one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name]
    shape = check_shape(entry.value("shape"), source)
    offsets = entry.integers("data_offsets", maximum=MAXIMUM_SIZE)
    if len(offsets) != 2:
        entry.refuse("data_offsets", "a first and a last offset")
    size, span = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if span != size:
        raise InputError(
            f"{source}: {dtype.name}{list(shape)} takes {size:,} bytes, but its "
            f"offsets span {span:,} from {offsets[0]:,}"
        )
    return _Array(dtype, shape, *offsets)


def _check_contiguous(file: Path, arrays: Mapping[str, _Array]) -> None:
    """Checks that each array begins where the one before it ends."""
    end, previous = 0, "the header"
    for name, array in sorted(
        arrays.items(), key=lambda item: (item[1].begin, item[1].end)
    ):
        if array.begin != end:
            raise InputError(
                f"{shown(name)} in {file} begins at byte {array.begin:,} of the data, "
                f"expected {end:,}, where {previous} ends: arrays neither overlap nor "
                "leave gaps; the file is damaged: fetch it again"
            )
        end, previous = array.end, shown(name)


def _read(
    file: Path, begin: int, dtype: np.dtype, shape: tuple[int, ...], block: Block
) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)[block]
    # Mapped as bytes, since the format does not guarantee alignment.
    data = np.memmap(file, np.uint8, "r", begin, (size,))
    # The ellipsis keeps an array of no axes an array.
    return data.view(dtype).reshape(shape)[(*block, ...)]


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array of a file that is computed when it is written.

    `chunks` returns its parts, consecutive in C order.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[np.ndarray]]

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    file: Path, entries: Sequence[Entry], on_written: Callable[[int], None]
) -> None:
    """Writes a file array by array, without holding it in memory.

    `on_written` gets the number of bytes of each part after it was written.

    Raises:
      ValueError: if the parts of an array do not add up to its size.
    """
    # In this order arrays without a gap begin at multiples of their element's size.
    whole = [entry for entry in entries if entry.bytes % ALIGNMENT == 0]
    unaligned = [entry for entry in entries if entry.bytes % ALIGNMENT]
    entries = whole + sorted(unaligned, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, dict[str, Any]] = {METADATA: {"format": "pt"}}
    start = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.bytes],
        }
        start += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for entry in entries:
            size = 0
            for chunk in entry.chunks():
                data = np.ascontiguousarray(chunk, entry.dtype)
                opened.write(data.reshape(-1).view(np.uint8).data)
                size += data.nbytes
                on_written(data.nbytes)
            if size != entry.bytes:
                raise ValueError(f"{entry.name} has {size} bytes, not {entry.bytes}")
