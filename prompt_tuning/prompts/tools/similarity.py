"""Similarity of prompts, a hint at which tasks may help each other.

The two measures are from Vu et al. 2022 ("SPoT"); they compare prompts of any lengths
for one model.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError

Prompts = Sequence[Float[np.ndarray, "_ D"]]
Measure = Callable[[Prompts], Float[np.ndarray, "k k"]]
_SMALLEST = 1e-12


def average_similarity(prompts: Prompts) -> Float[np.ndarray, "k k"]:
    """Cosine similarity of the prompts' mean vectors.

    Raises:
      InputError: if the widths of the prompts differ.
    """
    _check_widths(prompts)
    means = _normalize(
        np.stack([prompt.mean(0, dtype=np.float64) for prompt in prompts])
    )
    return means @ means.T


def pairwise_similarity(prompts: Prompts) -> Float[np.ndarray, "k k"]:
    """Mean cosine similarity of each vector of one prompt with each vector of another.

    A prompt's similarity with itself is below 1, unless all its vectors are parallel.

    Raises:
      InputError: if the widths of the prompts differ.
    """
    _check_widths(prompts)
    # The mean over pairs of a dot product is the dot product of the means.
    means = np.stack(
        [_normalize(prompt.astype(np.float64)).mean(0) for prompt in prompts]
    )
    return means @ means.T


def nearest(
    similarities: Float[np.ndarray, "k k"], index: int
) -> list[tuple[int, float]]:
    """Returns the other prompts with their similarity to one, nearest first."""
    row = similarities[index]
    order = np.argsort(-row, kind="stable")
    return [(int(place), float(row[place])) for place in order if place != index]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest names that distinguish some paths.

    A common ending of all paths is dropped, so that runs are named by their
    directories.

    Raises:
      InputError: if a path is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise InputError(f"{paths[index]} is given twice; name each prompt once")
    parts = [path.parts for path in resolved]
    while len(parts) > 1 and len({path[-1] for path in parts}) == 1:
        parts = [path[:-1] for path in parts]
    names = [_distinct_suffix(path, parts) for path in parts]
    plain = [name.removesuffix(".npy") for name in names]
    return plain if len(set(plain)) == len(plain) else names


def _distinct_suffix(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> str:
    """Returns the shortest suffix of a path that no other path has."""
    suffixes = (path[-depth:] for depth in range(1, len(path) + 1))
    distinct = (
        suffix
        for suffix in suffixes
        if [known[-len(suffix) :] for known in paths].count(suffix) == 1
    )
    return "/".join(next(distinct))


def check_widths(names: Sequence[str], prompts: Prompts) -> None:
    """Checks that prompts have the same width, as prompts of one model do.

    Raises:
      InputError: gives the widths of the first two that differ.
    """
    for name, prompt in zip(names[1:], prompts[1:], strict=True):
        if prompt.shape[1] != prompts[0].shape[1]:
            raise InputError(
                f"{name} is {prompt.shape[1]} wide and {names[0]} is "
                f"{prompts[0].shape[1]}: only prompts of one model can be compared; "
                "`prompt-tuning recycle` maps a prompt to another model"
            )


def _check_widths(prompts: Prompts) -> None:
    check_widths([f"prompt {index}" for index in range(len(prompts))], prompts)


def _normalize(vectors: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    """Scales vectors to length 1; zero vectors remain zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, _SMALLEST)
