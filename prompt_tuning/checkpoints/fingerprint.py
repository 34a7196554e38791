"""Samples of a checkpoint, to check that all processes read the same files.

Each process reads only its own shards of a checkpoint. If two processes had different
files, they would build one model from both, and no joint computation would reveal it.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.array_slices import Block

SAMPLES = 64
"""Minimum number of samples per parameter."""

MINIMUM = 4
"""Minimum number of samples per stored array, and of sampled layers if chunked."""

SAMPLE_SIZE = 64
"""Numbers per sample; reading them costs no more than reading one."""


def sampled(plan: RestorePlan) -> list[str]:
    """Returns a line with a digest for each parameter that is read from a checkpoint.

    The digest covers a sample of the numbers in this process's files, at the same
    positions in all processes, whichever shards they hold.

    Raises:
      InputError: if the checkpoint turns out to be damaged.
    """
    # Scales are computed from the same stored arrays as their kernels.
    derived = plan.derived
    return [
        f"{path}: samples {_digest([plan.stored[name] for name in recipe.sources])}"
        for path, recipe in plan.restored.items()
        if path not in derived
    ]


def _digest(tensors: list[StoredTensor]) -> str:
    digest = hashlib.sha256()
    if any(tensor.pieces is not None for tensor in tensors):
        tensors = [tensors[i] for i in _spread(len(tensors), MINIMUM)]
    samples = max(MINIMUM, -(-SAMPLES // len(tensors)))
    for tensor in tensors:
        digest.update(f"{tensor.shape} {tensor.dtype}".encode())
        for block in _blocks(tensor, samples):
            digest.update(tensor.read(block).tobytes())
    return digest.hexdigest()[:16]


def _blocks(tensor: StoredTensor, samples: int) -> Iterable[Block]:
    """Returns the sampled blocks: evenly spaced ones, or the chunk in the middle."""
    if tensor.pieces is not None:
        sizes = zip(tensor.shape, tensor.pieces, strict=True)
        firsts = [((size - 1) // 2 // piece * piece, piece) for size, piece in sizes]
        return [
            tuple(
                slice(first, min(first + piece, size))
                for (first, piece), size in zip(firsts, tensor.shape, strict=True)
            )
        ]
    return [_sample(tensor, index) for index in _spread(tensor.size, samples)]


def _sample(tensor: StoredTensor, index: int) -> Block:
    """Returns the block of consecutive numbers of the last axis from a flat index."""
    if not tensor.shape:
        return ()
    *leading, last = (int(i) for i in np.unravel_index(index, tensor.shape))
    end = min(last + SAMPLE_SIZE, tensor.shape[-1])
    return *(slice(i, i + 1) for i in leading), slice(last, end)


def _spread(size: int, count: int) -> list[int]:
    return np.linspace(0, size - 1, min(size, count)).astype(int).tolist()
