"""Base classes of prompts, and what a prompt class declares about itself.

To add a prompt, write one module with a subclass of `InputPrompt`,
`InputDependentPrompt` or `KeyValuePrefix`, and a config with the same name. The class
declares where it attaches (`attachment`), how files store it (`form`), how to export it
(`export`) and which vectors to inspect (`input_vectors`). Models, files and commands
ask the class, so none of them lists all prompts.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.adapters.adapter import MULTITASK, PROMPT, Arrays, factorize
from prompt_tuning.core.bounded_updates import Ball
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.masks import Count
from prompt_tuning.prompts.initializers import Initializer, Vocabulary, uniform


class Attachment(enum.Enum):
    """Where a prompt enters a model.

    `INPUT` prompts add vectors to the input of the first block. `EVERY_BLOCK` prompts
    do so too, and also change the hidden states at the prompt's positions before each
    later block. `KEYS_AND_VALUES` prompts give every block keys and values for its
    self-attention.
    """

    INPUT = enum.auto()
    EVERY_BLOCK = enum.auto()
    KEYS_AND_VALUES = enum.auto()

    @property
    def at_input(self) -> bool:
        """Whether the model's input includes prompt vectors."""
        return self is not Attachment.KEYS_AND_VALUES


@dataclasses.dataclass(frozen=True)
class StoredForm:
    """How files store the prompts of one adapter kind.

    Attributes:
      kind: name of PEFT's method, or our own name for a method that PEFT lacks.
      axes: the axes of each array, e.g. `{"prompt": "P D"}`, by the leaf below
        `{encoder|decoder}/prompt/`. Names of leaves and their numbers of axes identify
        the kind.
      settings: the axis that gives each argument needed to rebuild the prompt.
    """

    kind: str
    axes: Mapping[str, str]
    settings: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"length": "P"}
    )

    def matches(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether arrays of these shapes, by leaf, are of this kind."""
        axes = {leaf: len(names.split()) for leaf, names in self.axes.items()}
        return axes == {leaf: len(shape) for leaf, shape in shapes.items()}

    def read_settings(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the arguments that rebuild a prompt with arrays of these shapes."""
        sizes: dict[str, int] = {}
        for leaf, names in self.axes.items():
            sizes |= dict(zip(names.split(), shapes[leaf], strict=True))
        return {argument: sizes[axis] for argument, axis in self.settings.items()}


class ExportedPrompt(NamedTuple):
    """A prompt as arrays that need no module to evaluate them.

    Attributes:
      kind: the kind of the adapter.
      arrays: float32 arrays by leaf.
      settings: PEFT settings that the arrays do not reveal, if not the defaults.
    """

    kind: str
    arrays: Arrays
    settings: Mapping[str, Any] = {}


class PromptModule(nnx.Module):
    """A prompt, wherever it attaches.

    Attributes:
      attachment: where it enters the model.
      form: the stored form that this class is rebuilt from; None for a class that is
        always exported as another one.
      has_penalty: whether `penalty` may differ from 0; known before anything runs.
      drops: whether training drops something, which needs a random key.
      frozen_slots: how many of a prefix's first positions stay as they start.
    """

    attachment: ClassVar[Attachment]
    form: ClassVar[StoredForm | None] = None
    has_penalty: bool = False
    drops: bool = False
    frozen_slots: int = 0

    @property
    def ball(self) -> Ball | None:
        """Region that training may move the vectors in; None for anywhere."""
        return None

    @property
    def length(self) -> int:
        """Number of vectors or positions `P` of each prompt, including padding."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Number of prompts, `N`: one per task, or per member of an ensemble."""
        return 1

    def penalty(self) -> Float[Array, ""]:
        """Term that the prompt adds to the training loss."""
        return jnp.zeros(())

    def export(self) -> ExportedPrompt:
        """Evaluates the prompt, without dropout, into arrays to store."""
        raise NotImplementedError

    def input_vectors(
        self,
    ) -> Float[np.ndarray, "P D"] | Float[np.ndarray, "N P D"] | None:
        """Vectors in the input, without padding; None for other prompts."""
        return None

    @classmethod
    def factory_for(
        cls, shapes: Mapping[str, tuple[int, ...]]
    ) -> Callable[..., "PromptModule"]:
        """Returns a factory of prompts with arrays of these shapes, by leaf.

        The shapes must match `form`.
        """
        assert cls.form is not None
        build: Callable[..., PromptModule] = cls
        return functools.partial(build, **cls.form.read_settings(shapes))


class InputPrompt(PromptModule):
    """A prompt in a model's input: one prompt of `P` vectors, or `N` of them.

    A subclass defines `length` and the vectors. It runs as a shared stream if it comes
    first and sees no text, else joined to the text. `placement` defines the positions
    of its vectors, and `models.prompted` the masks. However the vectors are computed,
    the prompt is exported as plain vectors.
    """

    attachment = Attachment.INPUT

    @property
    def real_length(self) -> Count:
        """Number of vectors without padding, which comes last."""
        return self.length

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Returns the vectors, unbatched, of the one prompt or of all `N`.

        `key` is a random key for dropout among the vectors; None disables it.
        """
        raise NotImplementedError

    def block_values(self) -> Float[Array, "L P W"]:
        """Each block's values for the prompt's positions; only for `EVERY_BLOCK`."""
        raise NotImplementedError

    def enter_block(
        self, hidden: Float[Array, "*lead D"], values: Float[Array, "*lead W"]
    ) -> Float[Array, "*lead D"]:
        """Returns the input of a block after the first; only for `EVERY_BLOCK`.

        Args:
          hidden: output of the previous block at the prompt's positions.
          values: the block's `block_values` for these positions.
        """
        raise NotImplementedError

    def input_vectors(
        self,
    ) -> Float[np.ndarray, "P D"] | Float[np.ndarray, "N P D"] | None:
        """The vectors, evaluated without dropout; padding is cut off."""
        return np.asarray(self())[..., : int(self.real_length), :]

    def export(self) -> ExportedPrompt:
        """Exports the vectors; more than one prompt is factorized, as in PEFT."""
        vectors = self.input_vectors()
        assert vectors is not None
        if vectors.ndim == 3:
            return ExportedPrompt(MULTITASK, factorize(vectors))
        return ExportedPrompt(PROMPT, {"prompt": vectors})


class InputDependentPrompt(InputPrompt):
    """A prompt that computes its vectors from the text of each example.

    A subclass defines `length` and `for_text`. The prompt is joined to every row, and
    may read only the input tokens: in generation, the completion is unknown.
    """

    def for_text(
        self,
        tokens: Int[Array, "B T"],
        embedded: Float[Array, "B T D"],
        given: Bool[Array, "B T"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P D"]:
        """Returns the vectors of each example.

        Args:
          tokens: ids of the tokens.
          embedded: embeddings of the tokens.
          given: marks the example's input tokens, possibly none; the rest are padding,
            targets or other examples.
          key: random key for dropout among the vectors; None disables it.
        """
        raise NotImplementedError

    def input_vectors(self) -> None:
        """Returns None: the vectors differ from example to example."""
        return

    def export(self) -> ExportedPrompt:
        """Exports the parameters that compute the vectors."""
        assert self.form is not None
        arrays = {leaf: np.asarray(getattr(self, leaf)[...]) for leaf in self.form.axes}
        return ExportedPrompt(self.form.kind, arrays)


PromptFactory = Callable[[Key[Array, ""], Vocabulary], PromptModule]
"""A prompt class with all arguments bound except the key and the vocabulary."""

InputPromptFactory = Callable[[Key[Array, ""], Vocabulary], InputPrompt]
"""A `PromptFactory` of prompts among the input."""


class Constant:
    """Hides an array from NNX, which would make it part of the model's state.

    Instead it becomes part of the model's structure: two constants are equal if their
    numbers are.
    """

    def __init__(self, array: np.ndarray):
        self.array = array
        self._hash = hash((array.shape, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return self._hash


def constants(graph: nnx.GraphDef) -> list[np.ndarray]:
    """Returns the arrays hidden in a model's structure, in order."""
    values = [getattr(attribute, "value", None) for _, attribute in graph.attributes]
    return [value.array for value in values if isinstance(value, Constant)]


def initial_vectors(
    key: Key[Array, ""],
    vocabulary: Vocabulary,
    length: int,
    initializer: Initializer | None,
    *,
    width: int | None = None,
) -> Float[Array, "P W"]:
    """Runs an initializer and checks its result.

    `initializer` is uniform on `[0, 0.5)` if None, and `width` the model's.

    Raises:
      InputError: if the length is below 1 or the result has another shape.
    """
    if length < 1:
        raise InputError(f"the prompt's length is {length}, expected at least 1")
    shape = (length, vocabulary.width if width is None else width)
    initial = (initializer or uniform())(key, shape, vocabulary)
    if initial.shape != shape:
        owner = "the model" if width is None else "these parameters"
        raise InputError(
            f"the prompt's initializer returned {initial.shape}, expected {shape}: "
            f"length of the prompt, width of {owner}"
        )
    return initial.astype(jnp.float32)
