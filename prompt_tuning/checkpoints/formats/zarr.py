"""Zarr version 2 arrays, as T5X writes its large ones, read by TensorStore.

TensorStore supports all compressors, and reads only the chunks that a block touches. It
is imported when an array is opened, since most checkpoints contain none.
"""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.slices import Block

if TYPE_CHECKING:
    import tensorstore


def open_zarr(folder: Path) -> StoredTensor:
    """Opens the array in a folder.

    Raises:
      InputError: if the folder contains no array, or its metadata is damaged or not
        supported. Reading a block raises it for a chunk that is damaged, or missing
        although the array declares no fill value.
    """
    import tensorstore

    file = folder / ".zarray"
    if not file.is_file():
        raise InputError(
            f"{file} is missing; the checkpoint refers to a zarr array there"
        )
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        # TensorStore would read zeros for missing chunks without a fill value.
        "fill_missing_data_reads": _declares_fill_value(file),
    }
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            f"{file} is not zarr 2 metadata that can be read: {_reason(error)}"
        ) from error
    return StoredTensor(
        tuple(array.shape),
        array.dtype.numpy_dtype,
        str(folder),
        functools.partial(_read_block, array, folder),
        tuple(size or 1 for size in array.chunk_layout.read_chunk.shape or ()),
    )


def _declares_fill_value(file: Path) -> bool:
    try:
        metadata = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from error
    return isinstance(metadata, dict) and metadata.get("fill_value") is not None


def _read_block(
    array: "tensorstore.TensorStore", folder: Path, block: Block
) -> np.ndarray:
    try:
        return array[block].read().result()
    except ValueError as error:
        raise InputError(
            f"{folder} has a chunk that is damaged or missing: {_reason(error)}; the "
            "copy is incomplete or damaged: fetch it again"
        ) from error


def _reason(error: Exception) -> str:
    """Returns TensorStore's message without the source locations that follow it."""
    return str(error).partition(" [")[0]
