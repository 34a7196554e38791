"""Prompts that are held near a discrete one."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.initializers import Initializer, Vocabulary, from_array
from prompt_tuning.prompts.soft import Constant, SoftPrompt


class WaywardPrompt(SoftPrompt):
    """Vectors that start at a text's embeddings and pay for leaving them.

    The loss gains `gamma * sum_p |prompt[p] - discrete[p]|^2 / P` (Khashabi et al.
    2022, "Prompt Waywardness").

    Attributes:
      prompt: the vectors, `[P, D]`, float32, `P` the text's tokens.
      gamma: the weight of the distance.
    """

    has_penalty = True

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        text: str,
        gamma: float = 0.01,
        initializer: Initializer | None = None,
    ):
        """Starts the vectors.

        Args:
          key: random key of the initialiser, if one is given.
          vocabulary: of the frozen model; tokenizes and embeds the text.
          text: the discrete prompt; each of its tokens is a vector.
          gamma: the weight of the distance, at least 0.
          initializer: where the vectors start instead of at the text.

        Raises:
          InputError: if gamma is negative, the text gives no token, or there is no
            tokenizer.
        """
        if not gamma >= 0:
            raise InputError(f"gamma is {gamma}, expected 0 or more")
        discrete = np.asarray(vocabulary.rows(vocabulary.encode(text)))
        start = initializer or from_array(discrete)
        super().__init__(key, vocabulary, length=len(discrete), initializer=start)
        self.gamma = gamma
        self._discrete = Constant(discrete)

    def penalty(self) -> Float[Array, ""]:
        """`gamma` times the mean squared distance between vectors and tokens."""
        away = self.prompt[...] - self._discrete.array
        return self.gamma * jnp.square(away).sum() / self.length
