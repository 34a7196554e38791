"""Base class of prompts that compute their vectors from another prompt."""

from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError, kind_of
from prompt_tuning.core.masks import Count
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
