"""Prompts whose vectors a small network computes from trained ones.

The network only helps training. Evaluated, the prompt is plain vectors, and so it is
exported.
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


class MLPPrompt(WrappedPrompt):
    """Two hidden layers over each vector (Liu et al. 2021, "GPT Understands, Too").

    Computes `output(relu(middle(relu(hidden(x)))))`, as PEFT's P_TUNING does. The
    initial vectors are the network's output, not the inner prompt's vectors.

    Attributes:
      inner: the prompt whose vectors are the network's input.
      hidden, middle, output: linear layers `[D, W]`, `[W, W]` and `[W, D]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        hidden_width: AxisLength | None = None,
    ):
        """Initializes the vectors and the network.

        Args:
          key: random key of both.
          vocabulary: vocabulary of the frozen model; gives the width `D`.
          inner: factory of the inner prompt, such as a `SoftPrompt`.
          hidden_width: width `W` of the hidden layers; `D` if None.

        Raises:
          InputError: if the hidden width is below 1, or the inner prompt cannot be
            built.
        """
        super().__init__(key, vocabulary, inner)
        width, hidden = vocabulary.width, _width(hidden_width, vocabulary.width)
        sizes = {
            "hidden": (width, hidden),
            "middle": (hidden, hidden),
            "output": (hidden, width),
        }
        axes = {
            "hidden": ("prompt_embed", "prompt_hidden"),
            "middle": ("prompt_hidden", "prompt_middle"),
            "output": ("prompt_hidden", "prompt_embed"),
        }
        self.hidden, self.middle, self.output = (
            Linear(named_key(key, name), *sizes[name], axes=axes[name])
            for name in sizes
        )

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Applies the network to the inner prompt's vectors."""
        hidden = jax.nn.relu(self.hidden(self.inner(optional_key(key, "inner"))))
        return self.output(jax.nn.relu(self.middle(hidden)))


class ResidualPrompt(WrappedPrompt):
    """`x + norm(up(relu(down(x))))` over each vector (Razdaibiedina et al. 2023).

    Attributes:
      inner: the prompt whose vectors are the network's input.
      down, up: linear layers `[D, W]` and `[W, D]`.
      scale, bias: `[D]`, parameters of the layer norm after them.
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
        """Initializes the vectors and the network.

        Args:
          key: random key of both.
          vocabulary: vocabulary of the frozen model; gives the width `D`.
          inner: factory of the inner prompt, such as a `SoftPrompt`.
          hidden_width: width `W` between the layers; `D` if None.
          norm_scale: initial scale of the norm. With 1, as published, the network's
            output has unit variance, which drowns an inner prompt that starts at small
            token embeddings; with 0 the prompt starts at the inner one.

        Raises:
          InputError: if the hidden width is below 1, or the inner prompt cannot be
            built.
        """
        super().__init__(key, vocabulary, inner)
        width, hidden = vocabulary.width, _width(hidden_width, vocabulary.width)
        self.down = Linear(
            named_key(key, "down"),
            width,
            hidden,
            axes=("prompt_embed", "prompt_hidden"),
        )
        self.up = Linear(
            named_key(key, "up"), hidden, width, axes=("prompt_hidden", "prompt_embed")
        )
        self.scale = nnx.Param(
            jnp.full((width,), norm_scale, jnp.float32), axes=("prompt_embed",)
        )
        self.bias = nnx.Param(jnp.zeros((width,)), axes=("prompt_embed",))

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
        size_in: int,
        size_out: int,
        *,
        axes: tuple[str, str],
    ):
        initial = fan_in(size_in)(key, (size_in, size_out), jnp.float32)
        self.kernel = nnx.Param(initial, axes=axes)
        self.bias = nnx.Param(jnp.zeros((size_out,)), axes=axes[1:])

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies the layer to the last axis."""
        return x @ self.kernel[...] + self.bias[...]


def _width(given: int | None, default: int) -> int:
    width = default if given is None else given
    if width < 1:
        raise InputError(f"hidden_width is {width}, expected at least 1")
    return width
