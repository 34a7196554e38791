"""What a prompt vector looks like to the model: its norm and its nearest tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.errors import InputError


class Neighbours(NamedTuple):
    """One prompt vector among the token embeddings.

    Attributes:
      norm: its Euclidean norm.
      tokens: ids of the nearest tokens, nearest first.
      similarities: their cosine similarities.
    """

    norm: float
    tokens: tuple[int, ...]
    similarities: tuple[float, ...]


def nearest_tokens(
    prompt: Float[np.ndarray, "P D"], embeddings: Float[np.ndarray, "V D"], count: int
) -> list[Neighbours]:
    """The tokens whose embeddings point most nearly where each vector does.

    Args:
      prompt: prompt vectors.
      embeddings: the token embedding table.
      count: tokens for each vector.

    Raises:
      InputError: if the widths differ or `count` is not positive.
    """
    if prompt.shape[1] != embeddings.shape[1]:
        raise InputError(
            f"the prompt is {prompt.shape[1]} wide and the model's embeddings are "
            f"{embeddings.shape[1]}: it was trained on another model"
        )
    if count < 1:
        raise InputError(f"{count} nearest tokens were asked for, expected at least 1")
    norms = np.linalg.norm(prompt, axis=1)
    table = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1), 1e-12)[:, None]
    similarities = (prompt / np.maximum(norms, 1e-12)[:, None]) @ table.T
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :count]
    return [
        Neighbours(
            float(norm),
            tuple(int(token) for token in tokens),
            tuple(float(row[token]) for token in tokens),
        )
        for norm, tokens, row in zip(norms, order, similarities, strict=True)
    ]
