"""Prompts that compute their vectors from another prompt, e.g. with dropout."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.errors import InputError, kind_of
from prompt_tuning.core.masks import Count
from prompt_tuning.core.number_ranges import ShareBelowOne
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Attachment,
    InputDependentPrompt,
    InputPrompt,
    InputPromptFactory,
)


class WrappedPrompt(InputPrompt):
    """A prompt computed from an inner one, with the inner prompt's padding and penalty.

    Attributes:
      inner: the inner prompt.
    """

    def __init__(
        self, key: Key[Array, ""], vocabulary: Vocabulary, inner: InputPromptFactory
    ):
        """Builds the inner prompt.

        Raises:
          InputError: if it does not attach at the input only.
        """
        self.inner = inner(key, vocabulary)
        if (
            not isinstance(self.inner, InputPrompt)
            or isinstance(self.inner, InputDependentPrompt)
            or self.inner.attachment is not Attachment.INPUT
            or self.inner.ball is not None
        ):
            raise InputError(
                f"{type(self).__name__}.inner makes {kind_of(self.inner)}, expected a "
                "prompt at the input alone that does not depend on the text, such as "
                "SoftPrompt"
            )
        self.has_penalty = self.inner.has_penalty
        self.drops = self.inner.drops

    @property
    def length(self) -> int:
        """Number of vectors `P` of the inner prompt."""
        return self.inner.length

    @property
    def real_length(self) -> Count:
        """Number of the inner prompt's vectors without padding."""
        return self.inner.real_length

    @property
    def count(self) -> int:
        """Number of prompts `N` of the inner prompt."""
        return self.inner.count

    def penalty(self) -> Float[Array, ""]:
        """The inner prompt's penalty."""
        return self.inner.penalty()


class DroppedPrompt(WrappedPrompt):
    """Another prompt with dropout: each training step zeroes some of its numbers.

    The remaining numbers are scaled by `1 / (1 - rate)`. Try it where a prompt overfits
    few examples. Generation, evaluation and export drop nothing.

    Args:
      inner: the prompt, e.g. `SoftPrompt(length=5)`.
      rate: probability that a number is dropped, from 0 to below 1.

    Raises:
      InputError: if the rate is out of range, or the inner prompt cannot be built.

    Examples:
      >>> prompt = pt.DroppedPrompt(inner=pt.SoftPrompt(length=5), rate=0.2)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        rate: ShareBelowOne = 0.1,
    ):
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
