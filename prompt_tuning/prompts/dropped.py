"""Dropout among the numbers of a prompt, in training."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import InputPromptFactory, WrappedPrompt


class DroppedPrompt(WrappedPrompt):
    """Another prompt, of whose numbers some are 0 at each training step.

    Those that stay are scaled by `1 / (1 - rate)`; without a key nothing is dropped.

    Attributes:
      inner: the other prompt.
      rate: how likely a number is dropped.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        rate: float = 0.1,
    ):
        """Builds the inner prompt.

        Args:
          key: random key of the inner prompt's start.
          vocabulary: of the frozen model.
          inner: makes the other prompt, such as a `SoftPrompt`.
          rate: at least 0 and below 1.

        Raises:
          InputError: if the rate is none, or the inner prompt refuses.
        """
        if not 0 <= rate < 1:
            raise InputError(f"the prompt's dropout rate is {rate}, expected 0 to 1")
        super().__init__(key, vocabulary, inner)
        self.rate = rate
        self.drops = self.drops or rate > 0

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """The vectors, with dropout if there is a key."""
        vectors = self.inner(optional_key(key, "inner"))
        numbers = jnp.arange(vectors[..., 0].size).reshape(vectors.shape[:-1])
        places = DropoutIndex.at_positions(numbers, vectors.shape[-1])
        return dropout(vectors, self.rate, optional_key(key, "dropout"), places)
