"""How alike prompts are: what tells which tasks may help each other.

The two measures of Vu et al. 2022 ("SPoT"), for prompts of any lengths over one model.
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
      InputError: if the prompts are not of one width.
    """
    _check_widths(prompts)
    means = _unit(np.stack([prompt.mean(0, dtype=np.float64) for prompt in prompts]))
    return means @ means.T


def pairwise_similarity(prompts: Prompts) -> Float[np.ndarray, "k k"]:
    """Mean cosine similarity of each vector of one prompt with each of the other.

    A prompt's similarity with itself is below 1, unless its vectors all point one way.

    Raises:
      InputError: if the prompts are not of one width.
    """
    _check_widths(prompts)
    # The mean over pairs of a dot product is the dot product of the means.
    means = np.stack([_unit(prompt.astype(np.float64)).mean(0) for prompt in prompts])
    return means @ means.T


def nearest(
    similarities: Float[np.ndarray, "k k"], index: int
) -> list[tuple[int, float]]:
    """The other prompts and their similarities with one, nearest first."""
    row = similarities[index]
    order = np.argsort(-row, kind="stable")
    return [(int(other), float(row[other])) for other in order if other != index]


def short_names(paths: Sequence[Path]) -> list[str]:
    """What tells some paths apart, each as short as it may be.

    What all end with is dropped, so that runs go by their directories' names.

    Raises:
      InputError: if one path is given twice.
    """
    whole = [path.resolve() for path in paths]
    for place, path in enumerate(whole):
        if path in whole[:place]:
            raise InputError(f"{paths[place]} is given twice; name each prompt once")
    parts = [path.parts for path in whole]
    while len(parts) > 1 and len({own[-1] for own in parts}) == 1:
        parts = [own[:-1] for own in parts]
    names = [_distinct_end(own, parts) for own in parts]
    plain = [name.removesuffix(".npy") for name in names]
    return plain if len(set(plain)) == len(plain) else names


def _distinct_end(own: tuple[str, ...], every: Sequence[tuple[str, ...]]) -> str:
    """The fewest last parts of a path that no other path ends with."""
    ends = (own[-depth:] for depth in range(1, len(own) + 1))
    distinct = (
        end for end in ends if [other[-len(end) :] for other in every].count(end) == 1
    )
    return "/".join(next(distinct))


def check_widths(names: Sequence[str], prompts: Prompts) -> None:
    """Refuses prompts of different models.

    Raises:
      InputError: with the width of the first two that differ.
    """
    for name, prompt in zip(names[1:], prompts[1:], strict=True):
        if prompt.shape[1] != prompts[0].shape[1]:
            raise InputError(
                f"{name} is {prompt.shape[1]} wide and {names[0]} is "
                f"{prompts[0].shape[1]}: only prompts of one model can be compared; "
                "`prompt-tuning recycle` maps a prompt to another model"
            )


def _check_widths(prompts: Prompts) -> None:
    check_widths([f"prompt {place}" for place in range(len(prompts))], prompts)


def _unit(vectors: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "n D"]:
    """Vectors of length 1; those of zeros stay."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, _SMALLEST)
