"""Open the arrays of any checkpoint or array file by name, and compare them."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.adapters.peft import folder as peft_folder
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.adapters.prompt_files import (
    CODES,
    SAFETENSORS,
    SCALES,
    find_checkpoint,
)
from prompt_tuning.adapters.prompt_files import read_array as read_lone_array
from prompt_tuning.checkpoints.formats import safetensors
from prompt_tuning.checkpoints.formats.t5x_checkpoint import open_t5x
from prompt_tuning.checkpoints.quantized.methods import open_weights
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block, whole
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.numpy_files import MAGIC, read_npy, read_npz

EQUAL, DIFFERENT, SHAPES = "equal", "different", "shapes differ"
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"
BLOCK_SIZE = 2**24
"""Number of elements of each array that are compared at a time."""


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """Comparison of two arrays with the same name.

    Attributes:
      name: the name.
      outcome: `EQUAL` in every element, `DIFFERENT`, `SHAPES`, `ONLY_FIRST` or
        `ONLY_SECOND`.
      first: dtype and shape in the first checkpoint; None if absent.
      second: the same in the second one.
      unequal: number of elements that differ; NaN equals NaN.
      not_finite: how many of these are infinite or NaN in either array.
      maximum: maximum absolute difference of finite elements.
      mean: sum of these differences divided by the array's number of elements.
    """

    name: str
    outcome: str
    first: str | None = None
    second: str | None = None
    unequal: int = 0
    not_finite: int = 0
    maximum: float = 0.0
    mean: float = 0.0

    def exceeds(self, tolerance: float | int) -> bool:
        """Whether the arrays differ by more than a tolerance."""
        if self.outcome == DIFFERENT:
            return self.not_finite > 0 or self.maximum > tolerance
        return self.outcome != EQUAL


def open_arrays(path: Path) -> dict[str, StoredTensor]:
    """Opens all arrays of a checkpoint, where possible without reading them.

    Args:
      path: a Hugging Face or PEFT folder, a T5X checkpoint, a run directory (its best
        checkpoint if it kept one, else the latest) or one of its checkpoints, or a
        safetensors, .npy or .npz file. The array of a .npy file is named "array".
        Quantized weights are opened as the floats that they stand for.

    Raises:
      InputError: if there are no arrays in these formats at the path.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; expected a checkpoint")
    if path.is_file():
        return _open_file(path)
    if _is_t5x(path):
        return open_t5x(path)
    # A run may also have a PEFT folder, and the stored keys and values of its prompt.
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        state = checkpoint_files.verify(checkpoint)
        return _in_memory(checkpoint_files.read_trained(checkpoint, state), path)
    adapter = peft_folder.find_folder(path)
    if adapter is not None:
        return safetensors.read_header(adapter / peft_folder.TENSORS)
    names = {child.name for child in path.iterdir()}
    if "config.json" in names:
        return open_weights(path)
    if any(name.endswith(SAFETENSORS) for name in names):
        return safetensors.open_safetensors(path)
    return open_t5x(path)


def _is_t5x(path: Path) -> bool:
    """Whether a folder is, or directly contains, a T5X checkpoint."""
    folders = (path, *path.glob("checkpoint_*"))
    return any((folder / "checkpoint").is_file() for folder in folders)


def _open_file(path: Path) -> dict[str, StoredTensor]:
    if path.suffix == SAFETENSORS:
        stored = safetensors.read_header(path)
        if stored.keys() == {CODES, SCALES}:
            return _in_memory({EMBEDDINGS: read_lone_array(path)}, path)
        return stored
    if path.suffix == ".npz":
        return _in_memory(read_npz(path), path)
    with path.open("rb") as file:
        is_array = path.suffix == ".npy" or file.read(len(MAGIC)) == MAGIC
    return _in_memory({"array": read_npy(path)}, path) if is_array else open_t5x(path)


def _in_memory(arrays: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(array.shape, array.dtype, str(path), array.__getitem__)
        for name, array in arrays.items()
    }


def read_array(path: Path, name: str) -> np.ndarray:
    """Reads one array of a checkpoint; bfloat16 becomes float32, for NumPy's format.

    Raises:
      InputError: if the checkpoint has no such array.
    """
    arrays = open_arrays(path)
    if name not in arrays:
        last = name.rpartition("/")[2]
        similar = [other for other in sorted(arrays) if last in other]
        raise InputError(
            f"{path} has no array {shown(name)}; it contains "
            f"{shown((similar or sorted(arrays))[:5])}, ..."
        )
    array = arrays[name].read()
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def compare_arrays(
    first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor]
) -> Iterator[ArrayDifference]:
    """Compares arrays of the same name, block by block, in the order of names."""
    for name in sorted(first.keys() | second.keys()):
        yield _compare(name, first.get(name), second.get(name))


def _compare(
    name: str, first: StoredTensor | None, second: StoredTensor | None
) -> ArrayDifference:
    result = functools.partial(
        ArrayDifference, name, first=_describe(first), second=_describe(second)
    )
    if first is None:
        return result(outcome=ONLY_SECOND)
    if second is None:
        return result(outcome=ONLY_FIRST)
    if first.shape != second.shape:
        return result(outcome=SHAPES)
    unequal = not_finite = 0
    maximum = mean = 0.0
    for block in _blocks(first, second):
        one, other = first.read(block), second.read(block)
        differing = (one != other) & ~(_is_nan(one) & _is_nan(other))
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.abs(_wide(one[differing]) - _wide(other[differing]))
        finite = np.isfinite(distances)
        unequal += distances.size
        not_finite += distances.size - int(finite.sum())
        maximum = max(maximum, float(distances[finite].max(initial=0.0)))
        mean += float((distances[finite] / first.size).sum())
    return result(
        outcome=DIFFERENT if unequal else EQUAL,
        unequal=unequal,
        not_finite=not_finite,
        maximum=maximum,
        mean=mean,
    )


def _describe(tensor: StoredTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype.name}{list(tensor.shape)}"


def _is_nan(array: np.ndarray) -> np.ndarray:
    return np.asarray(array != array)


def _wide(array: np.ndarray) -> np.ndarray:
    """Converts to a dtype in which differences neither wrap nor round."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _blocks(first: StoredTensor, second: StoredTensor) -> Iterator[Block]:
    """Yields blocks of rows that cover both arrays, in whole chunks of their files."""
    if not first.shape:
        yield ()
        return
    row = max(1, math.prod(first.shape[1:]))
    rows = max(1, BLOCK_SIZE // row)
    chunk = max((t.pieces[0] for t in (first, second) if t.pieces), default=1)
    rows = max(chunk, rows // chunk * chunk)
    for start in range(0, first.shape[0], rows):
        stop = min(start + rows, first.shape[0])
        yield (slice(start, stop), *whole(first.shape[1:]))
