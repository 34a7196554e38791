"""T5X checkpoints in its native format (version 3).

A checkpoint is a folder `checkpoint_<step>` with a MessagePack file `checkpoint`: the
tree `{version, optimizer: {state, target}}`, serialized by Flax. A leaf of `target` is
an array inside that file, or a TensorStore spec that refers to a zarr folder next to
it. The file is mapped into memory: most of it is optimizer state, which is never read.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.formats import msgpack_index
from prompt_tuning.checkpoints.formats.msgpack_index import PackedFile, Span
from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, extent
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.file_names import check_links, path_within
from prompt_tuning.core.numpy_files import check_shape
from prompt_tuning.core.typed_json import as_object

NUMERIC = "biufc"
"""Kinds of NumPy's numeric dtypes."""
MAXIMUM_NAME = 1000
"""Maximum length of an array's name, which messages and reports print."""
WRITTEN_CHUNK = 2**26
"""Maximum size of a chunk that is written, in bytes, as in T5X."""
CHUNKED = "__msgpack_chunked_array__"


def open_t5x(path: str | Path) -> dict[str, StoredTensor]:
    """Opens the parameters of a T5X checkpoint, by name without `target/`.

    `path` is a `checkpoint_<step>` folder, a folder of those (the latest is opened), or
    the MessagePack file itself.

    Raises:
      InputError: if there is no checkpoint, the file is cut short or in another format,
        or an array is stored in an unsupported way.
    """
    file = find_checkpoint(Path(path))
    packed, tree = _unpack(file)
    target = tree.get("optimizer", {})
    target = target.get("target") if isinstance(target, dict) else None
    if not isinstance(target, dict) or not target:
        raise InputError(
            f"{file} has no optimizer/target, only {shown(list(tree))}; "
            "expected a T5X checkpoint of version 3"
        )
    return {
        name: _open_leaf(file, packed, name, leaf) for name, leaf in _leaves(target)
    }


def find_checkpoint(path: Path) -> Path:
    """Returns the MessagePack file of a checkpoint; `path` is as for `open_t5x`.

    Raises:
      InputError: if there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path} is missing; expected a T5X checkpoint")
    check_links(path, "checkpoint", "checkpoint_*")
    if (path / "checkpoint").is_file():
        return path / "checkpoint"
    steps = {
        int(match[1]): entry
        for entry in path.iterdir()
        if (match := re.fullmatch(r"checkpoint_(\d+)", entry.name))
    }
    if not steps:
        names = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise InputError(
            f"{path} has neither the file 'checkpoint' nor a 'checkpoint_<step>', "
            f"only {shortened(names)}"
        )
    latest = steps[max(steps)]
    check_links(latest, "checkpoint")
    file = latest if latest.is_file() else latest / "checkpoint"
    if not file.is_file():
        raise InputError(f"{file} is missing; the copy of {latest} is incomplete")
    return file


def _unpack(file: Path) -> tuple[PackedFile, dict]:
    try:
        packed = PackedFile(file)
        tree = packed.value()
    except ValueError as error:
        raise InputError(
            f"{file} ({file.stat().st_size:,} bytes) is not a complete msgpack file: "
            f"{error}"
        ) from error
    if not isinstance(tree, dict):
        raise InputError(
            f"{file} is not a T5X checkpoint: it contains no tree of names"
        )
    return packed, tree


def _leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if len(path) > MAXIMUM_NAME:
            raise InputError(
                f"{shown(path)} is a name of more than {MAXIMUM_NAME} characters"
            )
        is_spec = isinstance(value, dict) and {"driver", "kvstore"} <= value.keys()
        if isinstance(value, dict) and not is_spec and CHUNKED not in value:
            yield from _leaves(value, f"{path}/")
        else:
            yield path, value


def _open_leaf(file: Path, packed: PackedFile, name: str, leaf: object) -> StoredTensor:
    if isinstance(leaf, Span):
        array = _decode(file, packed, name, leaf)
        return StoredTensor(array.shape, array.dtype, str(file), array.__getitem__)
    if isinstance(leaf, dict) and CHUNKED in leaf:
        return _open_chunks(file, packed, name, leaf)
    if isinstance(leaf, dict):
        return open_zarr(_zarr_folder(file, name, leaf))
    raise InputError(
        f"{name} in {file} is {shown(leaf)}, neither an array nor a TensorStore spec; "
        "checkpoints in Orbax's format are not supported"
    )


def _decode(file: Path, packed: PackedFile, name: str, leaf: Span) -> np.ndarray:
    """Returns an array packed by Flax, as a view of the file."""
    if leaf.code not in msgpack_index.ARRAY_CODES:
        raise InputError(f"{name} in {file} has the extension type {leaf.code}")
    source = f"{name} in {file}"
    try:
        shape, dtype_name, data = packed.value(leaf)
        shape, size = check_shape(shape, source), data.size
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{source} is not a packed array: {error}") from error
    dtype = _named_dtype(dtype_name, source)
    expected = math.prod(shape) * dtype.itemsize
    if size != expected:
        raise InputError(
            f"{source} has {size:,} bytes, expected {expected:,} for "
            f"{dtype.name}{tuple(shape)}"
        )
    if not size:
        return np.empty(shape, dtype)
    view = np.frombuffer(packed.data, dtype, math.prod(shape), data.start)
    return view.reshape(shape)


def _named_dtype(name: object, source: str) -> np.dtype:
    """Returns the dtype with a name; raises `InputError` unless it is numeric."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    # NumPy parses the name, and raises anything for a wrong one.
    except Exception:
        dtype = None
    if dtype is None or dtype.kind not in NUMERIC or dtype.shape:
        raise InputError(f"{source} has an unknown dtype {shown(name)}")
    return dtype


def _open_chunks(file: Path, packed: PackedFile, name: str, leaf: dict) -> StoredTensor:
    """Opens an array that Flax split into flat chunks, since msgpack ends at 4 GiB."""
    try:
        sizes = [leaf["shape"][str(i)] for i in range(len(leaf["shape"]))]
        shape = check_shape(sizes, f"{name} in {file}")
        spans = [leaf["chunks"][str(i)] for i in range(len(leaf["chunks"]))]
        chunks = [_decode(file, packed, name, span) for span in spans]
        size = sum(chunk.size for chunk in chunks)
        if len({chunk.dtype for chunk in chunks}) > 1:
            raise ValueError("chunks of several dtypes")
        if not (shape and size) or size != math.prod(shape):
            raise ValueError(f"{size:,} numbers for the shape {shape}")
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise InputError(
            f"{name} in {file} is not an array in complete chunks: {error!r}"
        ) from error
    read = functools.partial(_read_chunks, chunks, shape)
    return StoredTensor(shape, chunks[0].dtype, str(file), read)


def _read_chunks(
    chunks: Sequence[np.ndarray], shape: tuple[int, ...], block: Block
) -> np.ndarray:
    """Reads a block of an array `[rows, ...]` in flat chunks, which may split a row.

    Only rows split between chunks are copied completely before slicing.
    """
    rows, *rest = block
    width = math.prod(shape[1:])
    result = np.empty(extent(block), chunks[0].dtype)
    ends = itertools.accumulate(chunk.size for chunk in chunks)
    # Cut before and after each row that is split between chunks.
    cuts = {row for end in ends for row in (end // width, math.ceil(end / width))}
    inner = sorted(row for row in cuts if rows.start < row < rows.stop)
    for first, last in itertools.pairwise([rows.start, *inner, rows.stop]):
        flat = _read_flat(chunks, first * width, last * width)
        part = flat.reshape(last - first, *shape[1:])
        result[first - rows.start : last - rows.start] = part[:, *rest]
    return result


def _read_flat(chunks: Sequence[np.ndarray], first: int, last: int) -> np.ndarray:
    """Returns numbers `[first, last)` of the joined chunks, as a view if possible."""
    parts, start = [], 0
    for chunk in chunks:
        part = chunk[max(0, first - start) : max(0, last - start)]
        if part.size:
            parts.append(part)
        start += chunk.size
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [chunks[0][:0]])


def _zarr_folder(file: Path, name: str, spec: dict) -> Path:
    """Returns the folder for a spec, whose bucket is the original checkpoint's."""
    source = f"{name} in {file}"
    if spec["driver"] != "zarr":
        raise InputError(f"{source}: driver {shown(spec['driver'])}, expected 'zarr'")
    path = as_object(spec["kvstore"], f"kvstore of {source}").text("path", "")
    return path_within(file.parent, path.rstrip("/"), source)


def write_t5x_checkpoint(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], step: int
) -> None:
    """Writes parameters, without optimizer state.

    The folder is empty, to be named `checkpoint_{step}`; names are without `target/`.
    Arrays with two or more axes become zarr folders, as in T5X, so only one of them is
    in memory at a time; smaller ones are in the MessagePack file.
    """
    from flax import serialization

    target: dict[str, Any] = {}
    for name, array in arrays:
        *parents, last = name.split("/")
        node = target
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array if array.ndim < 2 else _write_zarr(folder, name, array)
    state = {"step": np.asarray(step, np.int32), "param_states": {}}
    tree = {"version": 3, "optimizer": {"target": target, "state": state}}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))


def _write_zarr(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Writes an array to its own folder and returns its TensorStore spec."""
    import tensorstore

    path = f"target.{name.replace('/', '.')}"
    is_bfloat16 = array.dtype.name == "bfloat16"
    metadata = {
        "dtype": "bfloat16" if is_bfloat16 else array.dtype.str,
        "shape": list(array.shape),
        "chunks": _chunks(array),
        "compressor": {"id": "gzip", "level": 1},
        "fill_value": None,
    }
    spec = {"driver": "zarr", "metadata": metadata}
    store = {"driver": "file", "path": f"{(folder / path).absolute()}/"}
    opened = tensorstore.open(spec | {"kvstore": store}, create=True).result()
    try:
        opened.write(array).result()
    except ValueError as problem:
        # TensorStore reports errors of the operating system as values.
        raise InputError(f"{folder / path} cannot be written: {problem}") from problem
    return spec | {
        "kvstore": {"driver": "file", "path": path},
        "dtype": array.dtype.name,
    }


def _chunks(array: np.ndarray) -> list[int]:
    """Halves the largest axis until a chunk is small enough."""
    chunks = list(array.shape)
    while np.prod(chunks, dtype=np.int64) * array.dtype.itemsize > WRITTEN_CHUNK:
        largest = int(np.argmax(chunks))
        chunks[largest] = -(-chunks[largest] // 2)
    return chunks
