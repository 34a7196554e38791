"""Writes checkpoints in T5X's native format (version 3); see `t5x_checkpoint`.

Arrays with two or more axes become zarr folders next to the MessagePack file, as in
T5X, so only one of them is in memory at a time; smaller ones are in the file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError

MAXIMUM_CHUNK = 2**26
"""Maximum size of a chunk in bytes, as in T5X."""


def write_t5x_checkpoint(
    folder: Path, arrays: Iterable[tuple[str, np.ndarray]], step: int
) -> None:
    """Writes parameters, without optimizer state.

    The folder is empty, to be named `checkpoint_{step}`; names are without `target/`.
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
    while np.prod(chunks, dtype=np.int64) * array.dtype.itemsize > MAXIMUM_CHUNK:
        largest = int(np.argmax(chunks))
        chunks[largest] = -(-chunks[largest] // 2)
    return chunks
