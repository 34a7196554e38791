"""Prompt modules: they hold vectors and return them unbatched.

Where the vectors stand is `placement`'s business, what they do to the masks that of
`models.prompted`. A soft prompt enters at the input; it runs as a shared stream where
it stands first and sees no text, and joined to the text everywhere else.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.errors import InputError
from prompt_tuning.prompts.initializers import Initializer, Vocabulary, uniform


class SoftPrompt(nnx.Module):
    """`P` trained vectors, shared by every example (Lester et al. 2021, section 2).

    Attributes:
      prompt: the vectors, `[P, D]`, float32 whatever the model computes in.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        initializer: Initializer | None = None,
    ):
        """Starts the vectors.

        Args:
          key: random key of the initialiser.
          vocabulary: of the frozen model; gives the width `D`.
          length: vectors `P`, at least 1.
          initializer: `f(key, (P, D), vocabulary)`; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if the length is below 1, or the initialiser refuses.
        """
        initial = initial_vectors(key, vocabulary, length, initializer)
        self.prompt = nnx.Param(initial, axes=("prompt", "prompt_embed"))

    @property
    def length(self) -> int:
        """Vectors `P`."""
        return self.prompt.shape[0]

    @property
    def real_length(self) -> int:
        """Vectors that are no padding: all."""
        return self.length

    def __call__(self) -> Float[Array, "P D"]:
        """The vectors."""
        return self.prompt[...]


class PaddedPrompt(nnx.Module):
    """Vectors of which the first `count` are a prompt, the others padding.

    Prompts of several lengths have one shape so; a model lets nothing see the padding.

    Attributes:
      prompt: `[P, D]`, float32.
      count: how many vectors are no padding, int32 `[]`; never trained.
    """

    def __init__(self, vectors: Float[Array, "P D"], count: int):
        self.prompt = nnx.Param(vectors, axes=("prompt", "prompt_embed"))
        self.count = nnx.Param(jnp.array(count, jnp.int32), axes=())

    @property
    def length(self) -> int:
        """Vectors `P`, padding among them."""
        return self.prompt.shape[0]

    @property
    def real_length(self) -> Int[Array, ""]:
        """How many of them are no padding."""
        return self.count[...]

    def __call__(self) -> Float[Array, "P D"]:
        """The vectors, padding among them."""
        return self.prompt[...]


class InferenceOnlyPrompt(nnx.Module):
    """A prompt that is a constant: no parameter, nothing to restore or to train."""

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        initializer: Initializer | None = None,
    ):
        """Computes the vectors; arguments and errors as for `SoftPrompt`."""
        self._constant = _Constant(
            np.asarray(initial_vectors(key, vocabulary, length, initializer))
        )

    @property
    def length(self) -> int:
        """Vectors `P`."""
        return self._constant.array.shape[0]

    @property
    def real_length(self) -> int:
        """Vectors that are no padding: all."""
        return self.length

    def __call__(self) -> Float[Array, "P D"]:
        """The vectors."""
        return jnp.asarray(self._constant.array)


class _Constant:
    """Hides an array from NNX, which would make it part of the model's state."""

    def __init__(self, array: np.ndarray):
        self.array = array


def initial_vectors(
    key: Key[Array, ""],
    vocabulary: Vocabulary,
    length: int,
    initializer: Initializer | None,
) -> Float[Array, "P D"]:
    """Runs an initialiser and checks what it made.

    Raises:
      InputError: if the length is below 1 or the result has another shape.
    """
    if length < 1:
        raise InputError(f"the prompt's length is {length}, expected at least 1")
    shape = (length, vocabulary.width)
    initial = (initializer or uniform())(key, shape, vocabulary)
    if initial.shape != shape:
        raise InputError(
            f"the prompt's initialiser made {initial.shape}, expected {shape}: "
            "length of the prompt, width of the model"
        )
    return initial.astype(jnp.float32)
