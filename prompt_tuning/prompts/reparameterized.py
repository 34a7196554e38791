"""Prompts that a small network computes from trained vectors.

The network only helps training; the prompt is exported as plain vectors.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AnyNumber, AxisLength
from prompt_tuning.core.parameters import fan_in, named_key, optional_key
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prompt_module import InputPromptFactory
from prompt_tuning.prompts.wrapped import WrappedPrompt

NORM_EPSILON = 1e-5
EMBED, HIDDEN = "prompt_embed", "prompt_hidden"
"""Axes of the model's width and of a hidden layer."""


class MLPPrompt(WrappedPrompt):
    """Passes another prompt's vectors through two hidden layers (P-tuning).

    Liu et al. 2021, "GPT Understands, Too". Computes
    `output(relu(middle(relu(hidden(x)))))`, like PEFT's P_TUNING. The network only
    helps training, e.g. where a plain soft prompt stays at a high loss: the result is
    exported as plain vectors. They start at the network's output instead of the inner
    prompt's vectors, so the inner prompt's initializer has little effect.

    Args:
      inner: the prompt that feeds the network, e.g. `SoftPrompt(length=5)`.
      hidden_width: width `W` of the hidden layers; the model's `D` if None.

    Attributes:
      hidden, middle, output: linear layers `[D, W]`, `[W, W]` and `[W, D]`.

    Raises:
      InputError: if the hidden width is below 1, or the inner prompt cannot be built.

    Examples:
      >>> attached = model.attach(pt.MLPPrompt(inner=pt.SoftPrompt(length=5)))
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        hidden_width: AxisLength | None = None,
    ):
        super().__init__(key, vocabulary, inner)
        width, hidden = vocabulary.width, _width(hidden_width, vocabulary.width)
        inner_axes, outer_axes = (EMBED, HIDDEN), (HIDDEN, EMBED)
        self.hidden = Linear(key, "hidden", (width, hidden), inner_axes)
        middle_axes = (HIDDEN, "prompt_middle")
        self.middle = Linear(key, "middle", (hidden, hidden), middle_axes)
        self.output = Linear(key, "output", (hidden, width), outer_axes)

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Applies the network to the inner prompt's vectors."""
        hidden = jax.nn.relu(self.hidden(self.inner(optional_key(key, "inner"))))
        return self.output(jax.nn.relu(self.middle(hidden)))


class ResidualPrompt(WrappedPrompt):
    """Adds a small network's output to another prompt's vectors.

    Computes `x + norm(up(relu(down(x))))` for each vector `x` (Razdaibiedina et al.
    2023). Like `MLPPrompt` it only helps training and is exported as plain vectors, but
    with a small `norm_scale` it starts near the inner prompt, whose initializer keeps
    its effect.

    Args:
      inner: the prompt to change, e.g. `SoftPrompt(length=5)`.
      hidden_width: width `W` between the two layers; the model's `D` if None.
      norm_scale: initial scale of the norm. With 1, as published, the network's output
        has unit variance, which drowns vectors that start at small token embeddings;
        with 0 the prompt starts at the inner one.

    Attributes:
      down, up: linear layers `[D, W]` and `[W, D]`.
      scale, bias: `[D]`, parameters of the norm.

    Raises:
      InputError: if the hidden width is below 1, or the inner prompt cannot be built.

    Examples:
      >>> prompt = pt.ResidualPrompt(
      ...     inner=pt.SoftPrompt(length=5, initializer=pt.from_text("tail")),
      ...     hidden_width=16,
      ...     norm_scale=0.0,
      ... )
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        hidden_width: AxisLength | None = None,
        norm_scale: AnyNumber = 1.0,
    ):
        super().__init__(key, vocabulary, inner)
        width, hidden = vocabulary.width, _width(hidden_width, vocabulary.width)
        self.down = Linear(key, "down", (width, hidden), (EMBED, HIDDEN))
        self.up = Linear(key, "up", (hidden, width), (HIDDEN, EMBED))
        scale = jnp.full((width,), norm_scale, jnp.float32)
        self.scale = nnx.Param(scale, axes=(EMBED,))
        self.bias = nnx.Param(jnp.zeros((width,)), axes=(EMBED,))

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Adds the network's output to the inner prompt's vectors."""
        vectors = self.inner(optional_key(key, "inner"))
        output = self.up(jax.nn.relu(self.down(vectors)))
        output = jax.nn.standardize(output, epsilon=NORM_EPSILON)
        return vectors + output * self.scale[...] + self.bias[...]


class Linear(nnx.Module):
    """A trained linear layer, `x @ kernel + bias`, in float32.

    Attributes:
      kernel: `[in, out]`, initialized with standard deviation `in ** -0.5`.
      bias: `[out]`, initialized to 0.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        name: str,
        sizes: tuple[int, int],
        axes: tuple[str, str],
    ):
        """Draws the layer with the part of a prompt's random key that `name` names."""
        initial = fan_in(sizes[0])(named_key(key, name), sizes, jnp.float32)
        self.kernel = nnx.Param(initial, axes=axes)
        self.bias = nnx.Param(jnp.zeros(sizes[1:]), axes=axes[1:])

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies the layer to the last axis."""
        return x @ self.kernel[...] + self.bias[...]


def _width(chosen: int | None, default: int) -> int:
    width = default if chosen is None else chosen
    if width < 1:
        raise InputError(f"hidden_width is {width}, expected at least 1")
    return width
