"""Soft prompts: prompt vectors among the input, shared by all examples."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.adapter import PROMPT
from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Constant,
    InputPrompt,
    StoredForm,
    initial_vectors,
)


class SoftPrompt(InputPrompt):
    """`P` trained vectors, shared by all examples (Lester et al. 2021, section 2).

    Attributes:
      prompt: the vectors, `[P, D]`, in float32 whatever the model computes in.
    """

    form = StoredForm(PROMPT, {"prompt": "P D"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: Initializer | None = None,
    ):
        """Initializes the vectors.

        Args:
          key: random key of the initializer.
          vocabulary: vocabulary of the frozen model; gives the width `D`.
          length: number of vectors `P`, at least 1.
          initializer: `f(key, (P, D), vocabulary)`; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if the length is below 1, or the initializer fails.
        """
        initial = initial_vectors(key, vocabulary, length, initializer)
        self.prompt = nnx.Param(initial, axes=("prompt", "prompt_embed"))

    @property
    def length(self) -> int:
        """Number of vectors `P`."""
        return self.prompt.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the vectors."""
        del key
        return self.prompt[...]


class PaddedPrompt(InputPrompt):
    """Prompt vectors followed by padding.

    Padding gives prompts of different lengths one shape. The model masks it.

    Attributes:
      prompt: `[P, D]`, float32.
      real: number of vectors that are not padding, int32 `[]`; never trained.
    """

    def __init__(self, vectors: Float[Array, "P D"], real: int):
        self.prompt = nnx.Param(vectors, axes=("prompt", "prompt_embed"))
        self.real = nnx.Param(jnp.array(real, jnp.int32), axes=())

    @property
    def length(self) -> int:
        """Number of vectors `P`, including padding."""
        return self.prompt.shape[0]

    @property
    def real_length(self) -> Int[Array, ""]:
        """Number of vectors that are not padding."""
        return self.real[...]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the vectors, including padding."""
        del key
        return self.prompt[...]


class StackedPrompts(InputPrompt):
    """`N` prompts of one length for one frozen model, such as an ensemble's.

    Attributes:
      prompt: `[N, P, D]`, float32.
    """

    def __init__(self, vectors: Float[Array, "N P D"]):
        initial = vectors.astype(jnp.float32)
        self.prompt = nnx.Param(initial, axes=("tasks", "prompt", "prompt_embed"))

    @property
    def length(self) -> int:
        """Number of vectors `P` of each prompt."""
        return self.prompt.shape[1]

    @property
    def count(self) -> int:
        """Number of prompts, `N`."""
        return self.prompt.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """Returns the vectors of all prompts."""
        del key
        return self.prompt[...]


class InferenceOnlyPrompt(InputPrompt):
    """A constant prompt without parameters: nothing is restored or trained."""

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: Initializer | None = None,
    ):
        """Computes the vectors; arguments and errors as for `SoftPrompt`."""
        self._constant = Constant(
            np.asarray(initial_vectors(key, vocabulary, length, initializer))
        )

    @property
    def length(self) -> int:
        """Number of vectors `P`."""
        return self._constant.array.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the vectors."""
        del key
        return jnp.asarray(self._constant.array)
