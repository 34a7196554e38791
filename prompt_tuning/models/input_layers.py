"""Layers between the embeddings of tokens and prompts, and the first block."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core.dropout import dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.models.layers import Embedding
from prompt_tuning.models.norms import Norm, normalize
from prompt_tuning.models.row_info import positions_in_segment
from prompt_tuning.models.streams import Stream


def position_embedder(key: Key[Array, ""], config: ModelConfig) -> Embedding | None:
    """Creates the table of learned positions, if the model has one."""
    if config.positions != "learned":
        return None
    count = config.maximum_positions or 0
    return Embedding(named_key(key, "position_embedder"), config, count, "positions")


def sinusoids(
    positions: Int[Array, "*lead"], width: int, *, first: int = 0
) -> Float[Array, "*lead D"]:
    """Computes sinusoidal positions (Vaswani et al. 2017, section 3.5), sines first.

    `width` must be even. If `first`, the first position's number, is not 0, the lowest
    frequency is 1 / 10,000, as in fairseq (M2M-100).
    """
    half = width // 2
    steps = np.arange(half) / (half - 1 if first else half)
    angles = (positions + first)[..., None] * 10_000.0**-steps
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def type_embedder(key: Key[Array, ""], config: ModelConfig) -> Embedding | None:
    """Creates the table of token types, if the model has one."""
    if not config.token_types:
        return None
    return Embedding(
        named_key(key, "type_embedder"), config, config.token_types, "positions"
    )


def embedding_norm(key: Key[Array, ""], config: ModelConfig) -> Norm | None:
    """Creates the norm of all input vectors, if the model has one."""
    if not config.embedding_norm:
        return None
    return Norm(named_key(key, "embedding_norm"), config, stacked=None)


def second_types(
    tokens: Int[Array, "B T"], segments: Int[Array, "B T"] | None, separator: int
) -> Bool[Array, "B T"]:
    """Marks the tokens that follow a separator in their text.

    `separator` is `ModelConfig.separator_id`; packed rows need `segments`, the example
    of each token.
    """
    ends = (tokens == separator).astype(jnp.int32)
    preceding = jnp.cumsum(ends, axis=1) - ends
    if segments is not None:
        starts = jnp.arange(tokens.shape[1]) - positions_in_segment(segments)
        preceding -= jnp.take_along_axis(preceding, starts, axis=1)
    return preceding > 0


class InputLayers(nnx.Module):
    """Input layers of one stack of an encoder-decoder.

    Attributes:
      position_embedder: table `[positions, D]` of learned positions, or None.
      embedding_norm: norm of the input vectors, prompts included, or None.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.config = config
        self.position_embedder = position_embedder(key, config)
        self.embedding_norm = embedding_norm(key, config)

    def __call__(self, stream: Stream, key: Key[Array, ""] | None) -> Stream:
        """Applies the layers, then dropout; see `embed_inputs`."""
        layers = self.position_embedder, self.embedding_norm
        return embed_inputs(stream, self.config, *layers, key)


def embed_inputs(
    stream: Stream,
    config: ModelConfig,
    positions: Embedding | None,
    norm: Norm | None,
    key: Key[Array, ""] | None,
    types: Embedding | None = None,
) -> Stream:
    """Scales the vectors, adds learned positions and types, normalizes, and drops.

    Prompt vectors are treated like tokens. All positions get the first of the `types`.
    """
    hidden = stream.hidden.astype(config.dtype)
    if config.input_multiplier != 1:
        hidden = hidden * config.input_multiplier
    if positions is not None:
        hidden = hidden + positions(stream.positions, config.dtype)
    if config.positions.startswith("sinusoidal"):
        first = 2 * (config.positions == "sinusoidal_from_2")
        added = sinusoids(stream.positions, config.width, first=first)
        hidden = hidden + added.astype(config.dtype)
    if types is not None:
        hidden = hidden + types.embedding[0].astype(config.dtype)
    hidden = normalize(norm, hidden)
    hidden = dropout(hidden, config.dropout_rate, key, stream.dropout_index)
    return dataclasses.replace(stream, hidden=hidden)
