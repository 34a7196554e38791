"""Writes safetensors files array by array, without holding a file in memory."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.formats.safetensors import DTYPES, LENGTH_BYTES, METADATA

ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    """Writes a file.

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
