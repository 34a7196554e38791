"""Key/value prefixes: trained keys and values that every query can attend to.

Prefix tuning (Li and Liang 2021) and P-tuning v2 (Liu et al. 2022). No vector runs
through the model, so a prefix only costs attention. All rows share it, and see it
whatever their masks allow among the text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.adapters.adapter import PREFIX
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AxisLength, NonnegativeNumber
from prompt_tuning.core.parameters import named_key
from prompt_tuning.prompts.initializers import StackShape, Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Attachment,
    ExportedPrompt,
    PromptModule,
    StoredForm,
)
from prompt_tuning.prompts.reparameterized import Linear

PREFIX_AXES = ("prompt_layers", "key_value", "prompt", "prompt_heads", "prompt_head")

PrefixInitializer = Callable[
    [Key[Array, ""], tuple[int, ...], Vocabulary], Float[Array, "L 2 P G K"]
]


class KeyValuePrefix(PromptModule):
    """Trained keys and values of `P` positions before every row, in every block.

    Keys are stored as attention reads them, after any rotation, as in PEFT. Text starts
    at position `P`.

    Attributes:
      prompt: keys and values, `[L, 2, P, G, K]`, float32.
    """

    attachment = Attachment.KEYS_AND_VALUES
    form = StoredForm(PREFIX, {"prompt": "L 2 P G K"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: PrefixInitializer | None = None,
    ):
        """Initializes the keys and values.

        Args:
          key: random key of the initializer.
          vocabulary: vocabulary of the frozen model; gives the shape of its blocks.
          length: number of positions `P`, at least 1.
          initializer: `f(key, (L, 2, P, G, K), vocabulary)`; `normal()` if None.

        Raises:
          InputError: if the length is below 1, or the initializer returns another
            shape.
        """
        shape = prefix_shape(vocabulary.stack_for(type(self).__name__), length)
        initial = (initializer or normal())(key, shape, vocabulary)
        if initial.shape != shape:
            raise InputError(
                f"the prefix's initializer returned {initial.shape}, expected {shape}: "
                "blocks, keys and values, positions, key/value heads, head width"
            )
        self.prompt = nnx.Param(initial.astype(jnp.float32), axes=PREFIX_AXES)

    @property
    def length(self) -> int:
        """Number of positions `P`."""
        return self.prompt.shape[2]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "L 2 P G K"]:
        """Returns the keys and values."""
        del key
        return self.prompt[...]

    def export(self) -> ExportedPrompt:
        """Exports the keys and values."""
        return ExportedPrompt(PREFIX, {"prompt": np.asarray(self())})


class ProjectedKeyValuePrefix(KeyValuePrefix):
    """A prefix computed by `Linear(tanh(Linear(embedding)))` (Li and Liang 2021, 4.3).

    PEFT's `prefix_projection`. On export it is evaluated into plain keys and values.

    Attributes:
      embedding: `[P, D]`.
      inner: linear layer `[D, hidden]`.
      outer: linear layer `[hidden, L * 2 * G * K]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        hidden: AxisLength | None = None,
    ):
        """Initializes the projection.

        Args:
          key: random key.
          vocabulary: vocabulary of the frozen model; gives the shape of its blocks.
          length: number of positions `P`, at least 1.
          hidden: width between the two layers; the model's if None.

        Raises:
          InputError: if the length is below 1.
        """
        stack = vocabulary.stack_for(type(self).__name__)
        self.shape = prefix_shape(stack, length)
        width = vocabulary.width
        hidden = width if hidden is None else hidden
        out = self.shape[0] * 2 * self.shape[3] * self.shape[4]
        embedding = jax.random.normal(named_key(key, "embedding"), (length, width))
        self.embedding = nnx.Param(embedding, axes=("prompt", "prompt_embed"))
        inner, outer = (
            ("prompt_embed", "prompt_hidden"),
            ("prompt_hidden", "prompt_heads"),
        )
        self.inner = Linear(named_key(key, "inner"), width, hidden, axes=inner)
        self.outer = Linear(named_key(key, "outer"), hidden, out, axes=outer)

    @property
    def length(self) -> int:
        """Number of positions `P`."""
        return self.shape[2]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "L 2 P G K"]:
        """Computes the keys and values."""
        del key
        flat = self.outer(
            jnp.tanh(self.inner(self.embedding[...]))
        )  # [P, L * 2 * G * K]
        layers, two, length, groups, width = self.shape
        table = flat.reshape(length, layers, two, groups, width)
        return table.transpose(1, 2, 0, 3, 4)  # [L, 2, P, G, K]


def prefix_shape(stack: StackShape, length: int) -> tuple[int, int, int, int, int]:
    """Returns the shape `[L, 2, P, G, K]` of a prefix.

    Raises:
      InputError: if the length is below 1.
    """
    if length < 1:
        raise InputError(f"the prefix's length is {length}, expected at least 1")
    return (stack.layers, 2, length, stack.key_value_heads, stack.head_width)


def normal(deviation: NonnegativeNumber = 0.02) -> PrefixInitializer:
    """Normally distributed numbers.

    PEFT uses a deviation of 1, far from the keys and values that a model computes.

    Args:
      deviation: standard deviation.
    """

    def initialize(key, shape, vocabulary):
        del vocabulary
        return deviation * jax.random.normal(key, shape)

    return initialize
