"""Zarr version 2 arrays, as T5X writes its large ones, read by TensorStore.

TensorStore supports all compressors, and reads only the chunks that a block touches. It
is imported when an array is opened, since most checkpoints contain none.
"""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.numpy_files import check_shape
from prompt_tuning.core.typed_json import read_json

if TYPE_CHECKING:
    import tensorstore

KINDS = "biufc"
"""Kinds of NumPy's numeric dtypes."""
MAXIMUM_REASON = 500
"""Maximum length of TensorStore's message, which contains foreign values."""
MAXIMUM_METADATA = 2**20
"""Maximum size of `.zarray` in bytes."""
MAXIMUM_CHUNK = 2**32
"""Maximum size in bytes of an uncompressed chunk, which is always read whole."""
SMALL_CHUNK = 2**26
"""Size in bytes up to which a chunk may be larger than its array."""


def open_zarr(folder: Path) -> StoredTensor:
    """Opens the array in a folder.

    Raises:
      InputError: if the folder contains no array, or its metadata is damaged or not
        supported. Also raised when a block is read, if a chunk is damaged, or missing
        although the array declares no fill value.
    """
    import tensorstore

    file = folder / ".zarray"
    if not file.is_file():
        raise InputError(
            f"{file} is missing; the checkpoint refers to a zarr array there"
        )
    metadata = read_json(file, maximum_bytes=MAXIMUM_METADATA)
    _check_files(folder)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        # TensorStore would read zeros for missing chunks without a fill value.
        "fill_missing_data_reads": isinstance(metadata, dict)
        and metadata.get("fill_value") is not None,
    }
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
    except (ValueError, NotImplementedError) as error:
        raise InputError(
            f"{file} is not zarr 2 metadata that can be read: {_reason(error)}"
        ) from error
    tensor = StoredTensor(
        tuple(array.shape),
        array.dtype.numpy_dtype,
        str(folder),
        functools.partial(_read_block, array, folder),
        tuple(size or 1 for size in array.chunk_layout.read_chunk.shape or ()),
    )
    _check_chunk(file, tensor)
    return tensor


def _check_chunk(file: Path, tensor: StoredTensor) -> None:
    """Checks the size of a chunk before TensorStore allocates memory for it.

    TensorStore decompresses no more than this from a chunk.
    """
    check_shape(tensor.shape, str(file))
    if tensor.dtype.kind not in KINDS and tensor.dtype != ml_dtypes.bfloat16:
        raise InputError(f"{file} has dtype {tensor.dtype}, expected a numeric type")
    size = math.prod(tensor.pieces or ()) * tensor.dtype.itemsize
    # Chunks at the end of an axis are stored whole, so one may exceed the array.
    limit = min(MAXIMUM_CHUNK, max(tensor.bytes, SMALL_CHUNK))
    if size > limit:
        raise InputError(
            f"{file} declares chunks of {size:,} bytes, expected at most {limit:,} for "
            f"an array of {tensor.bytes:,}"
        )


def _check_files(folder: Path) -> None:
    """Checks that chunks are files: TensorStore would wait for a pipe forever."""
    for path in folder.rglob("*"):
        if not path.is_file() and not path.is_dir():
            raise InputError(f"{path} is not a file, expected a chunk of a zarr array")


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
    """Returns TensorStore's message without its source locations."""
    return str(error).partition(" [")[0][:MAXIMUM_REASON]
