"""Key/value prefixes: trained keys and values that every query can attend to.

Prefix tuning (Li and Liang 2021) and P-tuning v2 (Liu et al. 2022). No vector runs
through the model, so a prefix costs only attention. All rows share it and see it,
whatever their masks allow within the text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.adapters.adapter import CARTRIDGE, PREFIX
from prompt_tuning.core import number_ranges
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import named_key
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Attachment,
    ExportedPrompt,
    PromptModule,
    StoredForm,
)
from prompt_tuning.prompts.reparameterized import EMBED, HIDDEN, Linear
from prompt_tuning.prompts.stack_shape import StackShape

PREFIX_AXES = ("prompt_layers", "key_value", "prompt", "prompt_heads", "prompt_head")

PrefixInitializer = Callable[
    [Key[Array, ""], tuple[int, ...], Vocabulary], Float[Array, "L 2 P G K"]
]


class KeyValuePrefix(PromptModule):
    """Trained keys and values of `P` positions before every row, in every block.

    Prefix tuning (Li and Liang 2021). No vector runs through the model, so a prefix
    costs only attention: the cheapest method per step that acts in every block. PEFT
    reads it as PREFIX_TUNING. Keys are stored as attention reads them, i.e. after any
    rotation; text starts at position `P`.

    Args:
      length: number of positions `P`, at least 1.
      initializer: where keys and values start; `normal()` if None.
      frozen_slots: how many of the first positions stay as they start, below `P`.
        Models attend to their first position from everywhere, so a memory of a text
        freezes it (Eyuboglu et al. 2025, "Cartridges"). PEFT then reads the prefix as
        CARTRIDGE.

    Attributes:
      prompt: keys and values, `[L, 2, P, G, K]`, float32, for `G` key/value heads of
        width `K`.

    Raises:
      InputError: if the length is below 1, all slots are frozen, or the initializer
        returns another shape.

    Examples:
      >>> trained, _ = model.attach(pt.KeyValuePrefix(length=5)).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 5, 4, 32)
    """

    attachment = Attachment.KEYS_AND_VALUES
    form = StoredForm(PREFIX, {"prompt": "L 2 P G K"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: number_ranges.AxisLength,
        initializer: PrefixInitializer | None = None,
        frozen_slots: number_ranges.NonnegativeInteger = 0,
    ):
        shape = prefix_shape(vocabulary.stack_for(type(self).__name__), length)
        initial = (initializer or normal())(key, shape, vocabulary)
        if initial.shape != shape:
            raise InputError(
                f"the prefix's initializer returned {initial.shape}, expected {shape}: "
                "blocks, keys and values, positions, key/value heads, head width"
            )
        if frozen_slots >= length:
            raise InputError(
                f"KeyValuePrefix.frozen_slots is {frozen_slots}, but the prefix has "
                f"{length} slots, so nothing would be trained: freeze fewer, or give "
                f"{how_to_set('KeyValuePrefix.length', frozen_slots + 1)} at least"
            )
        self.prompt = nnx.Param(initial.astype(jnp.float32), axes=PREFIX_AXES)
        self.frozen_slots = frozen_slots

    @property
    def length(self) -> int:
        """Number of positions `P`."""
        return self.prompt.shape[2]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "L 2 P G K"]:
        """Returns the keys and values."""
        del key
        slots = self.prompt[...]
        if not self.frozen_slots:
            return slots
        frozen, moving = jnp.split(slots, [self.frozen_slots], axis=2)
        return jnp.concatenate([jax.lax.stop_gradient(frozen), moving], axis=2)

    def export(self) -> ExportedPrompt:
        """Exports the keys and values."""
        settings = {}
        if self.frozen_slots:
            count = self.frozen_slots
            settings = {"peft_type": CARTRIDGE, "num_frozen_tokens": count}
        return ExportedPrompt(PREFIX, {"prompt": np.asarray(self())}, settings)


class ProjectedKeyValuePrefix(KeyValuePrefix):
    """A prefix that a small network computes (Li and Liang 2021, section 4.3).

    The network is `Linear(tanh(Linear(embedding)))`. Li and Liang find the plain prefix
    unstable to train; the projection (PEFT's `prefix_projection`) helps. It exists only
    in training: the export has plain keys and values.

    Args:
      length: number of positions `P`, at least 1.
      hidden: width between the two layers; the model's `D` if None.

    Attributes:
      embedding: `[P, D]`.
      inner: linear layer `[D, hidden]`.
      outer: linear layer `[hidden, L * 2 * G * K]`.

    Raises:
      InputError: if the length is below 1.

    Examples:
      >>> prompt = pt.ProjectedKeyValuePrefix(length=5, hidden=16)
      >>> trained, _ = model.attach(prompt).partition()
      >>> trained["decoder/prompt/embedding"].shape
      (5, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: number_ranges.AxisLength,
        hidden: number_ranges.AxisLength | None = None,
    ):
        stack = vocabulary.stack_for(type(self).__name__)
        self.shape = prefix_shape(stack, length)
        width = vocabulary.width
        hidden = width if hidden is None else hidden
        out = self.shape[0] * 2 * self.shape[3] * self.shape[4]
        embedding = jax.random.normal(named_key(key, "embedding"), (length, width))
        self.embedding = nnx.Param(embedding, axes=("prompt", EMBED))
        self.inner = Linear(key, "inner", (width, hidden), (EMBED, HIDDEN))
        self.outer = Linear(key, "outer", (hidden, out), (HIDDEN, "prompt_heads"))

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
    layers = stack.layers - stack.sharing
    return (layers, 2, length, stack.key_value_heads, stack.head_width)


def normal(deviation: number_ranges.NonnegativeNumber = 0.02) -> PrefixInitializer:
    """Starts a `KeyValuePrefix` at normally distributed numbers.

    PEFT uses a deviation of 1, far from the keys and values that a model computes.

    Args:
      deviation: standard deviation, at least 0.

    Examples:
      >>> prefix = pt.KeyValuePrefix(length=5, initializer=pt.normal(deviation=0.1))
      >>> trained, _ = model.attach(prefix).partition()
      >>> round(float(trained["decoder/prompt/prompt"].std()), 1)
      0.1
    """

    def initialize(key, shape, vocabulary):
        del vocabulary
        return deviation * jax.random.normal(key, shape)

    return initialize
