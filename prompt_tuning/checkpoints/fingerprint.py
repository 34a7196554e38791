"""Samples of a checkpoint, by which processes find out that their files differ.

A process reads of a checkpoint its own parts alone, so that two with different files
would make one model of both, and nothing that they compute together shows it.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.quantization import scale_path
from prompt_tuning.core.slices import Block

PLACES = 64
"""Places that are looked at in a parameter, or more where it has many layers."""

LEAST = 4
"""Places in each stored array, and layers of those that are stored in pieces."""

RUN = 64
"""Numbers that are read at a place, which cost no more than one."""


def sampled(plan: RestorePlan) -> list[str]:
    """A line for each parameter that is read from a checkpoint, with a digest of it.

    The digest is of some numbers as this process's files have them, at the same places
    whatever parts of the parameter the process has.

    Args:
      plan: how the model is restored.

    Raises:
      InputError: if the checkpoint turns out to be damaged.
    """
    # Scales of int8 kernels follow from the same stored arrays.
    scales = set(map(scale_path, plan.quantized))
    return [
        f"{path}: samples {_digest([plan.stored[name] for name in recipe.sources])}"
        for path, recipe in plan.restored.items()
        if path not in scales
    ]


def _digest(tensors: list[StoredTensor]) -> str:
    digest = hashlib.sha256()
    if any(tensor.pieces is not None for tensor in tensors):
        tensors = [tensors[i] for i in _spread(len(tensors), LEAST)]
    places = max(LEAST, -(-PLACES // len(tensors)))
    for tensor in tensors:
        digest.update(f"{tensor.shape} {tensor.dtype}".encode())
        for block in _blocks(tensor, places):
            digest.update(tensor.read(block).tobytes())
    return digest.hexdigest()[:16]


def _blocks(tensor: StoredTensor, places: int) -> Iterable[Block]:
    """What is looked at: short runs evenly spaced, or the piece in the middle."""
    if tensor.pieces is not None:
        sizes = zip(tensor.shape, tensor.pieces, strict=True)
        firsts = [((size - 1) // 2 // piece * piece, piece) for size, piece in sizes]
        return [
            tuple(
                slice(first, min(first + piece, size))
                for (first, piece), size in zip(firsts, tensor.shape, strict=True)
            )
        ]
    return [_run(tensor, place) for place in _spread(tensor.size, places)]


def _run(tensor: StoredTensor, place: int) -> Block:
    """Some numbers of the last axis, from the one at a place."""
    if not tensor.shape:
        return ()
    *others, last = (int(i) for i in np.unravel_index(place, tensor.shape))
    end = min(last + RUN, tensor.shape[-1])
    return *(slice(i, i + 1) for i in others), slice(last, end)


def _spread(size: int, count: int) -> list[int]:
    return np.linspace(0, size - 1, min(size, count)).astype(int).tolist()
