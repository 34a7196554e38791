"""Prompt modules: they hold vectors and return them unbatched.

Where the vectors stand is `placement`'s business, what they do to the masks that of
`models.prompted`. A soft prompt enters at the input; it runs as a shared stream where
it stands first and sees no text, and joined to the text everywhere else.
"""

from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.masks import Count
from prompt_tuning.prompts.initializers import Initializer, Vocabulary, uniform


class PromptModule(nnx.Module):
    """What every prompt tells of itself, wherever it attaches.

    Attributes:
      has_penalty: whether `penalty` may be other than 0, known before anything runs.
      drops: whether a key makes a difference: something is dropped in training.
    """

    has_penalty: bool = False
    drops: bool = False

    @property
    def length(self) -> int:
        """Vectors or positions `P` of each prompt, padding among them."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """How many prompts, `N`: tasks, or members of an ensemble."""
        return 1

    def penalty(self) -> Float[Array, ""]:
        """What the prompt itself adds to the training loss."""
        return jnp.zeros(())


class InputPrompt(PromptModule):
    """What stands among a model's input: one prompt of `P` vectors, or `N` of them.

    A kind of prompt is a subclass that gives `length` and the vectors. Evaluated, it
    is plain vectors whatever made them: that is how it is exported.

    Attributes:
      at_every_block: whether later blocks have vectors of the prompt too.
    """

    at_every_block: ClassVar[bool] = False

    @property
    def real_length(self) -> Count:
        """How many of its vectors are no padding; they stand first."""
        return self.length

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """The vectors, unbatched, of the one prompt or of all `N`.

        Args:
          key: of dropout among the vectors; None where nothing is dropped.
        """
        raise NotImplementedError


class SoftPrompt(InputPrompt):
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

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """The vectors."""
        del key
        return self.prompt[...]


class PaddedPrompt(InputPrompt):
    """Vectors of which the first few are a prompt, the others padding.

    Prompts of several lengths have one shape so; a model lets nothing see the padding.

    Attributes:
      prompt: `[P, D]`, float32.
      real: how many vectors are no padding, int32 `[]`; never trained.
    """

    def __init__(self, vectors: Float[Array, "P D"], real: int):
        self.prompt = nnx.Param(vectors, axes=("prompt", "prompt_embed"))
        self.real = nnx.Param(jnp.array(real, jnp.int32), axes=())

    @property
    def length(self) -> int:
        """Vectors `P`, padding among them."""
        return self.prompt.shape[0]

    @property
    def real_length(self) -> Int[Array, ""]:
        """How many of them are no padding."""
        return self.real[...]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """The vectors, padding among them."""
        del key
        return self.prompt[...]


InputPromptFactory = Callable[[Key[Array, ""], Vocabulary], InputPrompt]
"""A prompt class to which everything but the key and the vocabulary is bound."""


class WrappedPrompt(InputPrompt):
    """A prompt made from another one, whose padding and penalty it keeps.

    Attributes:
      inner: the other prompt.
    """

    def __init__(
        self, key: Key[Array, ""], vocabulary: Vocabulary, inner: InputPromptFactory
    ):
        """Builds the inner prompt.

        Raises:
          InputError: if what the factory makes does not stand among the input.
        """
        self.inner = inner(key, vocabulary)
        if not isinstance(self.inner, InputPrompt) or self.inner.at_every_block:
            raise InputError(
                f"{type(self).__name__}.inner makes a {type(self.inner).__name__}, "
                "expected a prompt among the input alone, such as SoftPrompt"
            )
        self.has_penalty = self.inner.has_penalty
        self.drops = self.inner.drops

    @property
    def length(self) -> int:
        """Vectors `P` of the inner prompt."""
        return self.inner.length

    @property
    def real_length(self) -> Count:
        """Those of the inner prompt that are no padding."""
        return self.inner.real_length

    @property
    def count(self) -> int:
        """Prompts `N` of the inner one."""
        return self.inner.count

    def penalty(self) -> Float[Array, ""]:
        """The inner prompt's."""
        return self.inner.penalty()


class StackedPrompts(InputPrompt):
    """`N` prompts of one length over one frozen model, such as an ensemble's.

    Attributes:
      prompt: `[N, P, D]`, float32.
    """

    def __init__(self, vectors: Float[Array, "N P D"]):
        initial = vectors.astype(jnp.float32)
        self.prompt = nnx.Param(initial, axes=("tasks", "prompt", "prompt_embed"))

    @property
    def length(self) -> int:
        """Vectors `P` of each prompt."""
        return self.prompt.shape[1]

    @property
    def count(self) -> int:
        """How many prompts, `N`."""
        return self.prompt.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The vectors of all prompts."""
        del key
        return self.prompt[...]


class InferenceOnlyPrompt(InputPrompt):
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
        self._constant = Constant(
            np.asarray(initial_vectors(key, vocabulary, length, initializer))
        )

    @property
    def length(self) -> int:
        """Vectors `P`."""
        return self._constant.array.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """The vectors."""
        del key
        return jnp.asarray(self._constant.array)


class Constant:
    """Hides an array from NNX, which would make it part of the model's state.

    It is part of the model's structure instead: two are equal if their numbers are.
    """

    def __init__(self, array: np.ndarray):
        self.array = array
        self._hash = hash((array.shape, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return self._hash


def initial_vectors(
    key: Key[Array, ""],
    vocabulary: Vocabulary,
    length: int,
    initializer: Initializer | None,
    *,
    width: int | None = None,
) -> Float[Array, "P W"]:
    """Runs an initialiser and checks what it made.

    Args:
      key: random key of the initialiser.
      vocabulary: of the frozen model.
      length: vectors `P`.
      initializer: uniform on `[0, 0.5)` if None.
      width: of each vector; the model's if None.

    Raises:
      InputError: if the length is below 1 or the result has another shape.
    """
    if length < 1:
        raise InputError(f"the prompt's length is {length}, expected at least 1")
    shape = (length, vocabulary.width if width is None else width)
    initial = (initializer or uniform())(key, shape, vocabulary)
    if initial.shape != shape:
        whose = "the model" if width is None else "these parameters"
        raise InputError(
            f"the prompt's initialiser made {initial.shape}, expected {shape}: "
            f"length of the prompt, width of {whose}"
        )
    return initial.astype(jnp.float32)
