"""Extra inputs of each layer, looked up for each token (Gemma 4).

A table `[V, L d]` gives each token `d` elements for each of `L` layers. Up to the first
block they travel behind the token's embedding of `D` elements, so that both are joined
with prompts alike. There, a projection of the embedding is added to them. A prompt
vector has no token, so it has zeros in this place.

Google DeepMind 2025, "Gemma 3n model overview", "per-layer embeddings".
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, named_key
from prompt_tuning.models.layers import ACTIVATIONS, dense_layers
from prompt_tuning.models.norms import Norm
from prompt_tuning.models.streams import Stream, flatten_streams


class LayerInputs(nnx.Module):
    """Computes the extra inputs of all layers.

    Attributes:
      projection: `[D, L d]`.
      norm: norm of each layer's part of its output.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.config = config
        size = config.layer_input_width
        start = jax.nn.initializers.normal(config.width**-0.5)
        shape = (config.width, config.layers * size)
        self.projection = declare(
            named_key(key, "layer_projection"),
            shape,
            ("embed", "layer_inputs"),
            start,
            config.parameter_dtype,
        )
        norm_key = named_key(key, "layer_norm")
        self.norm = Norm(norm_key, config, stacked=None, width=size, axis="layer_input")

    def __call__(
        self, vectors: Float[Array, "n W"]
    ) -> tuple[Float[Array, "n D"], Float[Array, "L n d"]]:
        """Splits vectors of `D + L d` elements into embeddings and inputs of layers."""
        width, layers = self.config.width, self.config.layers
        hidden, of_tokens = vectors[:, :width], vectors[:, width:]
        projected = hidden @ self.projection[...].astype(hidden.dtype)
        projected = projected * width**-0.5  # [n, L d]
        parts = self.norm(projected.reshape(len(hidden), layers, -1))
        inputs = (parts + of_tokens.reshape(parts.shape)) * 2**-0.5
        return hidden, inputs.swapaxes(0, 1)


def first_inputs(
    layers: LayerInputs | None, streams: Sequence[Stream]
) -> tuple[Float[Array, "n D"], Float[Array, "L n d"] | None]:
    """Returns the first block's hidden states and the extra inputs of all blocks."""
    hidden = [stream.hidden for stream in streams]
    if layers is None:
        return flatten_streams(hidden), None
    whole = sum(layers.projection.shape)
    return layers(flatten_streams([pad_width(part, whole) for part in hidden]))


def pad_width(vectors: Float[Array, "*lead d"], width: int) -> Float[Array, "*lead W"]:
    """Appends zeros up to a width."""
    missing = width - vectors.shape[-1]
    if not missing:
        return vectors
    return jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, missing)])


class LayerInput(nnx.Module):
    """Adds the extra input to the output of each layer.

    Attributes:
      gate: `[L, D, d]`.
      projection: `[L, d, D]`.
      norm: norm of the addition, `[L, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.activation = ACTIVATIONS[config.activation]
        dense = dense_layers(key, config, layers, biased=False)
        size = config.layer_input_width
        self.gate = dense("gate", (config.width, size), ("embed", "layer_input"))
        self.projection = dense(
            "projection", (size, config.width), ("layer_input", "embed")
        )
        self.norm = Norm(named_key(key, "norm"), config, stacked=layers)

    def __call__(
        self, x: Float[Array, "n D"], extra: Float[Array, "n d"]
    ) -> Float[Array, "n D"]:
        """Computes the addition to hidden states."""
        gated = self.activation(self.gate(x)) * extra
        return self.norm(self.projection(gated))


def layer_factor(
    key: Key[Array, ""], config: ModelConfig, layers: int
) -> nnx.Param | None:
    """Declares the factor of each layer's output, `[L, 1]`, if the model has one."""
    if not config.layer_factors:
        return None
    ones, axes = jax.nn.initializers.ones, ((layers, 1), ("layers", "norm"))
    return declare(key, *axes, ones, config.parameter_dtype)
