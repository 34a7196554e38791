"""What a prompt vector looks like to the model: its norm and its nearest tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.soft import InputPrompt


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


def vectors_of(prompts: Mapping[str, Any]) -> dict[str, Float[np.ndarray, "P D"]]:
    """What prompts put among the input, by stack, and by task where there are several.

    Of a deep prompt that is its first block's; later blocks' vectors, keys and values
    stand beside nothing that is an embedding.

    Args:
      prompts: the modules by the stack that each is in.

    Raises:
      InputError: if there are keys and values alone.
    """
    found, others = {}, []
    for stack, prompt in prompts.items():
        if not isinstance(prompt, InputPrompt):
            others.append(f"{stack}/prompt is a {type(prompt).__name__}")
            continue
        vectors = np.asarray(prompt())[..., : int(prompt.real_length), :]
        if vectors.ndim == 2:
            found[f"{stack}/prompt"] = vectors
            continue
        for task, own in enumerate(vectors):
            found[f"{stack}/prompt, task {task}"] = own
    if others and not found:
        raise InputError(
            f"{' and '.join(others)}: keys and values of every block, which no token's "
            "embedding is like"
        )
    return found


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
