"""NumPy files of integers that token types are computed from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError
from prompt_tuning.core.numpy_files import read_npy


def read_array(file: str | Path, axes: Sequence[str]) -> Integer[np.ndarray, "..."]:
    """Reads an array of integers with the given axes from a `.npy` file."""
    array = read_npy(Path(file))
    if array.dtype.kind not in "iu":
        kind = str(array.dtype)[:MAXIMUM_SHOWN]
        raise InputError(f"{file} contains {kind}, expected an array of integers")
    if array.ndim != len(axes):
        raise InputError(
            f"{file} contains an array of shape {array.shape}, expected "
            f"[{', '.join(axes)}]"
        )
    return array
