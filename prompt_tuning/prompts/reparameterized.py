"""Prompts whose vectors are made by a small network from trained ones.

The network helps training alone: evaluated, the prompt is plain vectors, and so it is
exported.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import fan_in, named_key, optional_key
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import InputPromptFactory, WrappedPrompt

NORM_EPSILON = 1e-5


class MLPPrompt(WrappedPrompt):
    """Two hidden layers over each vector (Liu et al. 2021, "GPT Understands, Too").

    `output(relu(middle(relu(hidden(x)))))`, as PEFT's P_TUNING has it. The vectors that
    it starts with are the network's, not those of the inner prompt's initialiser.

    Attributes:
      inner: the prompt whose vectors go in.
      hidden, middle, output: the linear layers `[D, W]`, `[W, W]` and `[W, D]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        hidden_width: int | None = None,
    ):
        """Starts the vectors and the network.

        Args:
          key: random key of both.
          vocabulary: of the frozen model; gives the width `D`.
          inner: makes the prompt whose vectors go in, such as a `SoftPrompt`.
          hidden_width: `W` of the hidden layers; `D` if None.

        Raises:
          InputError: if the hidden width is below 1, or the inner prompt refuses.
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
        """What the network makes of the inner prompt's vectors."""
        hidden = jax.nn.relu(self.hidden(self.inner(optional_key(key, "inner"))))
        return self.output(jax.nn.relu(self.middle(hidden)))


class ResidualPrompt(WrappedPrompt):
    """`x + norm(up(relu(down(x))))` over each vector (Razdaibiedina et al. 2023).

    Attributes:
      inner: the prompt whose vectors go in.
      down, up: the linear layers `[D, W]` and `[W, D]`.
      scale, bias: `[D]`, of the layer norm behind them.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        inner: InputPromptFactory,
        hidden_width: int | None = None,
        norm_scale: float = 1.0,
    ):
        """Starts the vectors and the network.

        Args:
          key: random key of both.
          vocabulary: of the frozen model; gives the width `D`.
          inner: makes the prompt whose vectors go in, such as a `SoftPrompt`.
          hidden_width: `W` between the layers; `D` if None.
          norm_scale: what the norm's scale starts at. With 1, the published start, the
            network's share has unit variance, which hides an inner prompt that starts
            at small token embeddings; with 0 the prompt starts at the inner one.

        Raises:
          InputError: if the hidden width is below 1, or the inner prompt refuses.
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
        """The inner prompt's vectors, and what the network adds to them."""
        vectors = self.inner(optional_key(key, "inner"))
        made = self.up(jax.nn.relu(self.down(vectors)))
        made = jax.nn.standardize(made, epsilon=NORM_EPSILON)
        return vectors + made * self.scale[...] + self.bias[...]


class Linear(nnx.Module):
    """`x @ kernel + bias`, trained, in float32.

    Attributes:
      kernel: `[in, out]`, starting with deviation `in ** -0.5`.
      bias: `[out]`, starting at 0.
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
