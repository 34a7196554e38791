"""Zarr version 2 arrays, as T5X writes its large ones.

An array is a folder: `.zarray` (JSON) and one file for each chunk, named by the chunk's
indices ("3.0"; "0" for a scalar), all of the full chunk's shape, so that those at the
edge reach beyond the array (https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html).
"""

import dataclasses
import functools
import gzip
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.slices import Block, extent, relative


@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """What `.zarray` says of one array.

    Attributes:
      folder: the array's folder.
      shape: of the array.
      chunks: shape of a chunk.
      dtype: of the array.
      compressed: whether chunks are gzip files.
      order: "C" or "F", within a chunk.
      separator: between the indices in a chunk's name.
      fill_value: of the chunks that have no file; None if the array declares none.
    """

    folder: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    compressed: bool
    order: Literal["C", "F"]
    separator: str
    fill_value: float | int | str | bool | None


def open_zarr(folder: Path) -> StoredTensor:
    """Opens the array in a folder.

    Raises:
      InputError: if there is none, or if it is stored in a way that is not read here
        (another version, a filter, a compressor other than gzip). When it is read: for
        a chunk that is damaged, or that is missing where no fill value is declared.
    """
    layout = _read_layout(folder)
    read = functools.partial(_read_block, layout)
    return StoredTensor(layout.shape, layout.dtype, str(folder), read, layout.chunks)


def named_dtype(name: str, source: str) -> np.dtype:
    """The dtype of a name as NumPy, TensorStore and Flax write it.

    Raises:
      InputError: for a name that is none.
    """
    try:
        return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    except TypeError as error:
        raise InputError(f"{source} has an unknown dtype {name!r}") from error


def _read_layout(folder: Path) -> ChunkLayout:
    file = folder / ".zarray"
    if not file.is_file():
        raise InputError(
            f"{file} is missing; the checkpoint refers to a zarr array there"
        )
    try:
        metadata = json.loads(file.read_bytes())
        compressor = metadata["compressor"]
        layout = ChunkLayout(
            folder=folder,
            shape=tuple(metadata["shape"]),
            chunks=tuple(metadata["chunks"]),
            dtype=named_dtype(metadata["dtype"], str(file)),
            compressed=compressor is not None,
            order=metadata["order"],
            separator=metadata.get("dimension_separator", "."),
            fill_value=metadata["fill_value"],
        )
        _check_supported(file, metadata)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not zarr 2 metadata ({error!r})") from error
    if len(layout.chunks) != len(layout.shape) or 0 in layout.chunks:
        raise InputError(f"{file}: chunks {layout.chunks} cannot cover {layout.shape}")
    return layout


def _check_supported(file: Path, metadata: dict) -> None:
    compressor = (metadata["compressor"] or {"id": None})["id"]
    for what, found, known in (
        ("zarr_format", metadata["zarr_format"], (2,)),
        ("compressor", compressor, (None, "gzip")),
        ("filters", metadata.get("filters"), (None,)),
        ("order", metadata["order"], ("C", "F")),
    ):
        if found not in known:
            raise InputError(
                f"{file} has {what} {found!r}; read are {', '.join(map(repr, known))}"
            )


def _read_block(layout: ChunkLayout, block: Block) -> np.ndarray:
    """A block of the array; only the chunks that it touches are read."""
    result = np.empty(extent(block), layout.dtype)
    touched = [
        range(part.start // width, math.ceil(part.stop / width))
        for part, width in zip(block, layout.chunks, strict=True)
    ]
    for index in itertools.product(*touched):
        chunk = tuple(
            slice(i * width, (i + 1) * width)
            for i, width in zip(index, layout.chunks, strict=True)
        )
        common = tuple(
            slice(max(part.start, own.start), min(part.stop, own.stop))
            for part, own in zip(block, chunk, strict=True)
        )
        read = _read_chunk(layout, index)
        result[relative(common, block)] = read[relative(common, chunk)]
    return result


def _read_chunk(layout: ChunkLayout, index: tuple[int, ...]) -> np.ndarray:
    file = layout.folder / (layout.separator.join(map(str, index)) or "0")
    if not file.is_file():
        if layout.fill_value is None:
            raise InputError(
                f"{file}, a chunk of {layout.shape}, is missing and the array declares "
                "no fill value; the copy is incomplete: fetch it again"
            )
        return np.full(layout.chunks, layout.fill_value, layout.dtype)
    data = file.read_bytes()
    if layout.compressed:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{file} ({len(data):,} bytes) is not a whole gzip file: {error}"
            ) from error
    expected = math.prod(layout.chunks) * layout.dtype.itemsize
    if len(data) != expected:
        raise InputError(
            f"{file} holds {len(data):,} bytes, expected {expected:,} for a chunk of "
            f"shape {layout.chunks} in {layout.dtype.name}"
        )
    return np.frombuffer(data, layout.dtype).reshape(layout.chunks, order=layout.order)
