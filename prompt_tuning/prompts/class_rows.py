"""A trained head that scores an example's classes instead of tokens.

It replaces the model's output head: the logits are `[C]` scores of the classes, and an
example's target is the index of its class. So cross-entropy, accuracy, gradients,
micro-batches and optimizers work as for tokens and know nothing of classes. The head's
rows are stored like an adapter's arrays, and are trained, saved and resumed along with
any prompt or adapter.

`losses.class_objective` is something else: there the model's own head scores the text
of each label, which costs a row per label.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from prompt_tuning.core.model_choices import Pooling
from prompt_tuning.losses.output_head import AnyHead, OutputHead

NAME = "classes"
"""Name of the rows among the adapters of the output head."""


class ClassRows(nnx.Module):
    """Rows of a class head.

    Attributes:
      kernel: `[C, D]`, float32 (like the rest) whatever the model computes in.
      bias: `[C]`, or None.
      dense: kernel of the dense layer before it, `[D, D]`; None if it is frozen.
      dense_bias: bias of that layer, `[D]`, or None.
      dense_norm: scale of the norm after that layer, `[D]`, or None (ModernBERT).
      pooling: see `ClassHead.pooling`.
    """

    def __init__(
        self,
        kernel: Float[Array, "C D"],
        pooling: Pooling,
        bias: Float[Array, "C"] | None = None,
        dense: Float[Array, "D D"] | None = None,
        dense_bias: Float[Array, "D"] | None = None,
        dense_norm: Float[Array, "D"] | None = None,
    ):
        def declare(array):
            if array is None:
                return None
            return nnx.Param(array.astype(jnp.float32), axes=("adapter",) * array.ndim)

        self.kernel, self.bias = declare(kernel), declare(bias)
        self.dense, self.dense_bias = declare(dense), declare(dense_bias)
        self.dense_norm = declare(dense_norm)
        self.pooling: Pooling = pooling

    def output_head(self) -> AnyHead:
        """Returns the head as losses take it."""
        assert self.kernel is not None
        kernel = self.kernel[...]
        return kernel if self.bias is None else OutputHead(kernel, self.bias[...])


def mean_states(
    states: Float[Array, "B T D"], real: Bool[Array, "B T"]
) -> Float[Array, "B D"]:
    """Averages the normalized states of each row's real tokens, in float32.

    A row without real tokens gets 0.
    """
    weights = real[..., None].astype(jnp.float32)  # [B, T, 1]
    total = jnp.sum(states.astype(jnp.float32) * weights, axis=1)
    # A row that only fills a batch has no token.
    count = jnp.maximum(jnp.sum(weights, axis=1), 1)
    return (total / count).astype(states.dtype)


def initial_rows(key: jax.Array, classes: int, width: int) -> Float[Array, "C D"]:
    """Draws the rows of a new head as transformers does."""
    return 0.02 * jax.random.normal(key, (classes, width), jnp.float32)
