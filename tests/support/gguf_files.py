"""Writes GGUF files of any content, as ggml's document of the format describes them."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    """Encodes a text with its length."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def typed(value: Any) -> tuple[int, bytes]:
    """Returns the type and the bytes of a value of metadata."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<B", value)
    if isinstance(value, int):
        return UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    if isinstance(value, list):
        parts = [typed(item) for item in value]
        head = struct.pack("<IQ", parts[0][0], len(parts))
        return ARRAY, head + b"".join(content for _, content in parts)
    return STRING, text(value)


def field(name: str | bytes, value: Any) -> bytes:
    """Encodes a field of metadata."""
    kind, content = typed(value)
    return text(name) + struct.pack("<I", kind) + content


def entry(name: str, shape: tuple[int, ...], kind: str | int, offset: int) -> bytes:
    """Encodes an entry of the table of tensors."""
    number = TYPES[kind] if isinstance(kind, str) else kind
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + axes + struct.pack("<IQ", number, offset)


def header(tensors: int, fields: int, version: int = 3) -> bytes:
    """Encodes the beginning of a file."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


def padded(content: bytes) -> bytes:
    """Fills the last unit of the alignment."""
    return content + bytes(-len(content) % ALIGNMENT)


def write_gguf(
    file: Path,
    fields: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], str, np.ndarray]],
) -> Path:
    """Writes a file.

    Args:
      file: path of the file.
      fields: metadata.
      tensors: shape, type and bytes of each tensor, by its name.
    """
    content = header(len(tensors), len(fields))
    content += b"".join(field(name, value) for name, value in fields.items())
    data = b""
    for name, (shape, kind, array) in tensors.items():
        content += entry(name, shape, kind, len(data))
        data = padded(data + array.tobytes())
    file.write_bytes(padded(content) + data)
    return file


def float_tensors(
    arrays: dict[str, np.ndarray],
) -> dict[str, tuple[tuple[int, ...], str, np.ndarray]]:
    """Returns arrays of float32 as `write_gguf` takes them."""
    return {
        name: (array.shape, "F32", array.astype("<f4"))
        for name, array in arrays.items()
        if math.prod(array.shape)
    }
