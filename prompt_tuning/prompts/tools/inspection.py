"""Inspects prompt vectors: their norms and their nearest tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.errors import InputError, kind_of
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.prompts.prompt_module import PromptModule


class Neighbors(NamedTuple):
    """Nearest token embeddings of one prompt vector.

    Attributes:
      norm: Euclidean norm of the vector.
      tokens: ids of the nearest tokens, nearest first.
      similarities: cosine similarities of these tokens.
    """

    norm: float
    tokens: tuple[int, ...]
    similarities: tuple[float, ...]


def input_vectors(
    prompts: Mapping[str, PromptModule],
) -> dict[str, Float[np.ndarray, "P D"]]:
    """Returns the vectors that prompts add to the input, by stack and task.

    For a deep prompt these are the first block's vectors. Its other vectors, and keys
    and values, cannot be compared to embeddings. `prompts` has a module per stack.

    Raises:
      InputError: if no prompt has vectors in the input.
    """
    vectors, without = {}, []
    for stack, prompt in prompts.items():
        of_stack = prompt.input_vectors()
        if of_stack is None:
            without.append(f"{stack}/prompt is {kind_of(prompt)}")
        elif of_stack.ndim == 2:
            vectors[f"{stack}/prompt"] = of_stack
        else:
            for task, of_task in enumerate(of_stack):
                vectors[f"{stack}/prompt, task {task}"] = of_task
    if without and not vectors:
        raise InputError(
            f"{' and '.join(without)}: keys and values, and vectors that depend on "
            "each text, are not comparable to the tokens' embeddings"
        )
    return vectors


def nearest_tokens(
    prompt: Float[np.ndarray, "P D"], embeddings: Float[np.ndarray, "V D"], count: int
) -> list[Neighbors]:
    """Finds the `count` tokens with the most similar embeddings, by cosine.

    Raises:
      InputError: if the widths differ or `count` is not positive.
    """
    if prompt.shape[1] != embeddings.shape[1]:
        raise InputError(
            f"the prompt is {prompt.shape[1]} wide and the model's embeddings are "
            f"{embeddings.shape[1]}: it was trained on another model"
        )
    if count < 1:
        raise InputError(f"{count} nearest tokens were requested, expected at least 1")
    norms = np.linalg.norm(prompt, axis=1)
    table = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1), 1e-12)[:, None]
    similarities = (prompt / np.maximum(norms, 1e-12)[:, None]) @ table.T
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :count]
    return [
        Neighbors(
            float(norm),
            tuple(int(token) for token in tokens),
            tuple(float(row[token]) for token in tokens),
        )
        for norm, tokens, row in zip(norms, order, similarities, strict=True)
    ]


def shown_token(tokenizer: Tokenizer | None, token: int) -> str:
    """Returns a token as text, or as its id if the tokenizer does not have it."""
    if tokenizer is None or token >= tokenizer.vocabulary_size:
        return f"#{token}"
    return repr(tokenizer.token(token))
