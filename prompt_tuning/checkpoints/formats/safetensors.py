"""The safetensors format, mapped into memory.

A file is the length `N` of its header (8 bytes, little endian), the header (`N` bytes
of JSON: name -> dtype, shape, offsets) and the data (https://github.com/huggingface/
safetensors, "Format"). The header is parsed here so that the error for a damaged file
states both sizes, and so that an array, or a block of one, is a view of the file until
it is cast: only the pages of the file that contain the block are read.
"""

import functools
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.slices import Block

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
LENGTH_BYTES = 8


def open_safetensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Opens the arrays in a folder, in one file or several.

    As in Hugging Face libraries, `model.safetensors` has priority over the files that
    `model.safetensors.index.json` names; without either, all `*.safetensors` are read.

    Raises:
      InputError: for a folder or file that is missing, cut short or of another format,
        for a name that is in two files, and for an index with missing files or names.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected one with *.safetensors")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return read_header(folder / "model.safetensors")
    if index.exists():
        return _open_indexed(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise InputError(
            f"{folder} has no *.safetensors, only {found}; other formats of weights "
            "are not supported (a *.bin is a pickle): convert them with transformers"
        )
    return _open_files(files)


def _open_files(files: list[Path]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in stored:
                raise InputError(
                    f"{name} is in both {stored[name].source} and {file}; keep the "
                    "files of one checkpoint in the folder, or their index"
                )
            stored[name] = tensor
    return stored


def _open_indexed(index: Path) -> dict[str, StoredTensor]:
    weight_map = _parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} has no 'weight_map' of tensor names to files")
    files = sorted(set(map(str, weight_map.values())))
    for file in files:
        if Path(file).name != file or not (index.parent / file).is_file():
            raise InputError(
                f"{index} names {file!r}, which is not a file in {index.parent}; "
                f"the checkpoint has {len(files)} files: download all of them"
            )
    stored = _open_files([index.parent / file for file in files])
    for name, file in weight_map.items():
        if name not in stored:
            raise InputError(f"{index} lists {name} in {file}, which lacks it")
    return stored


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Opens the arrays in one file.

    Raises:
      InputError: if the file is not a whole safetensors file.
    """
    header, start = _header(file)
    header.pop("__metadata__", None)
    if not header:
        raise InputError(f"{file} contains no tensors")
    try:
        ends = [entry["data_offsets"][1] for entry in header.values()]
        expected, size = start + max(ends), file.stat().st_size
        if size != expected:
            raise InputError(
                f"{file} has {size:,} bytes, but its header describes {expected:,}; "
                "the copy is incomplete or damaged: fetch it again"
            )
        return {name: _tensor(file, name, header[name], start) for name in header}
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{file} has an invalid header entry: {error!r}") from error


def _header(file: Path) -> tuple[dict, int]:
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
                f"{file} ({size:,} bytes) is not a safetensors file: it begins with "
                f"{first!r} (a pointer of Git LFS, or another format?)"
            )
        if start > size:
            raise InputError(
                f"{file} has {size:,} bytes, but its header alone ends at {start:,}; "
                "the copy is incomplete: fetch it again"
            )
        opened.seek(LENGTH_BYTES)
        return _parse_json(file, opened.read(length)), start


def _parse_json(file: Path, text: bytes) -> dict:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise InputError(f"{file} does not contain valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{file} contains JSON that is not an object")
    return parsed


def _tensor(file: Path, name: str, entry: dict, start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise InputError(
            f"{name} in {file} has dtype {entry['dtype']!r}, expected one of "
            f"{', '.join(DTYPES)}"
        )
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise InputError(
            f"{name} in {file}: {dtype.name}{list(shape)} takes "
            f"{math.prod(shape) * dtype.itemsize:,} bytes, but its offsets span "
            f"{end - begin:,} from {begin:,}"
        )

    read = functools.partial(_read, file, start + begin, dtype, shape)
    return StoredTensor(shape, dtype, str(file), read)


def _read(
    file: Path, begin: int, dtype: np.dtype, shape: tuple[int, ...], block: Block
) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)[block]
    # Mapped as bytes, since the format does not guarantee alignment.
    data = np.memmap(file, np.uint8, "r", begin, (size,))
    return data.view(dtype).reshape(shape)[block]
