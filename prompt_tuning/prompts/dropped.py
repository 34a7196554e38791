"""Dropout within the vectors of a prompt, in training."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import ShareBelowOne
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prompt_module import InputPromptFactory
from prompt_tuning.prompts.wrapped import WrappedPrompt


class DroppedPrompt(WrappedPrompt):
    """A prompt with dropout: each training step sets some of its numbers to 0.

    The other numbers are scaled by `1 / (1 - rate)`. Without a key nothing is dropped.

    Attributes:
      inner: the prompt without dropout.
      rate: probability that a number is dropped.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        rate: ShareBelowOne = 0.1,
    ):
        """Builds the inner prompt.

        Args:
          key: random key of the inner prompt's initializer.
          vocabulary: vocabulary of the frozen model.
          inner: factory of the inner prompt, such as a `SoftPrompt`.
          rate: dropout rate, at least 0 and below 1.

        Raises:
          InputError: if the rate is out of range, or the inner prompt cannot be built.
        """
        if not 0 <= rate < 1:
            raise InputError(f"the prompt's dropout rate is {rate}, expected 0 to 1")
        super().__init__(key, vocabulary, inner)
        self.rate = rate
        self.drops = self.drops or rate > 0

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Returns the vectors, with dropout if there is a key."""
        vectors = self.inner(optional_key(key, "inner"))
        # Each vector has its own number, so that the mask does not depend on how the
        # prompt is laid out or split.
        numbers = jnp.arange(vectors[..., 0].size).reshape(vectors.shape[:-1])
        index = DropoutIndex.at_positions(numbers, vectors.shape[-1])
        return dropout(vectors, self.rate, optional_key(key, "dropout"), index)
