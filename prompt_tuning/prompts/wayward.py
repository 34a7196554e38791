"""Prompts that training keeps close to a discrete prompt."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import NonnegativeNumber
from prompt_tuning.prompts.initializers import Initializer, Vocabulary, from_array
from prompt_tuning.prompts.prompt_module import Constant
from prompt_tuning.prompts.soft import SoftPrompt


class WaywardPrompt(SoftPrompt):
    """Vectors that start at a text's embeddings, with a penalty on leaving them.

    The loss gains `gamma * sum_p |prompt[p] - discrete[p]|^2 / P` (Khashabi et al.
    2022, "Prompt Waywardness"). Use it to see how far a readable prompt can be
    improved, or to keep one readable: `prompt-tuning inspect` shows each vector's
    nearest tokens.

    Args:
      text: the discrete prompt; each of its tokens is a vector.
      gamma: weight of the squared distance, at least 0.
      initializer: where the vectors start, if not at the text.

    Attributes:
      prompt: the vectors, `[P, D]`, float32; `P` is the number of the text's tokens.

    Raises:
      InputError: if gamma is negative, the text has no tokens, or the model has no
        tokenizer.

    Examples:
      >>> attached = model.attach(pt.WaywardPrompt(text="tail: ", gamma=0.01))
      >>> attached.prompt_vectors()["decoder/prompt"].shape  # with the BOS token
      (6, 128)
    """

    has_penalty = True

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        text: str,
        gamma: NonnegativeNumber = 0.01,
        initializer: Initializer | None = None,
    ):
        if not gamma >= 0:
            raise InputError(f"gamma is {gamma}, expected 0 or more")
        discrete = np.asarray(vocabulary.rows(vocabulary.encode(text)))
        start = initializer or from_array(discrete)
        super().__init__(key, vocabulary, length=len(discrete), initializer=start)
        self.gamma = gamma
        self._discrete = Constant(discrete)

    def penalty(self) -> Float[Array, ""]:
        """Returns `gamma` times the mean squared distance to the text's embeddings."""
        difference = self.prompt[...] - self._discrete.array
        return self.gamma * jnp.square(difference).sum() / self.length
