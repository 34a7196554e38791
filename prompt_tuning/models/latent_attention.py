"""Latent attention: all heads' keys and values from one compressed vector.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Each position has a vector of
`key_value_rank` elements, from which each head computes its keys and values. All heads
share the rotated part of the keys. Queries may be compressed, too.

We expand keys and values before keeping them, so a cache stores them for every head.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.models.attention_layer import Attention, Projected
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.norms import Norm, normalize
from prompt_tuning.models.rotary import RotaryAngles, rotate_queries_and_keys
from prompt_tuning.sharding import collectives

EPSILON = 1e-6
"""Added to the mean square of compressed vectors, whatever the other norms add."""


class LatentAttention(Attention):
    """Projections of latent attention.

    The rotated elements of query and key heads come first, then `N` unrotated ones;
    checkpoints have the opposite order. Values are padded with zeros to the width of
    keys.

    Attributes:
      query_down: `[L, D, query_rank]`, or None if queries are not compressed.
      query_norm: norm of compressed queries, or None.
      query: `[L, query_rank, H * K]`, or `[L, D, H * K]`.
      key_value_down: `[L, D, key_value_rank + rotary_width]`.
      key_norm: norm of compressed keys and values.
      key: `[L, key_value_rank, H * N]`.
      value: `[L, key_value_rank, H * value_width]`.
      out: `[L, H * value_width, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        nnx.Module.__init__(self)
        self.config, self.head_width = config, config.head_width
        self.dropout_rate, self.scale = config.dropout_rate, config.score_scale
        self.interleaved = config.rotary_interleaved
        self.value_width = value_width = config.width_of_values
        self.query_gate = self.sinks = None
        heads, rank = config.heads, config.key_value_rank
        unrotated = config.head_width - config.rotated_width

        def dense(name, sizes, axes):
            return Dense(
                named_key(key, name),
                sizes,
                axes,
                layers=layers,
                bias=name in config.biased_projections,
                dtype=config.parameter_dtype,
            )

        def norm(name, width):
            part_key = named_key(key, name)
            norm = Norm(part_key, config, stacked=layers, width=width, axis="latent")
            norm.epsilon = EPSILON
            return norm

        width, size = config.width, config.query_rank
        axes = ("embed", "latent")
        self.query_down = dense("query_down", (width, size), axes) if size else None
        self.query_norm = norm("query_norm", size) if size else None
        inner, source = heads * config.head_width, "latent" if size else "embed"
        self.query = dense("query", (size or width, inner), (source, "heads"))
        down = rank + config.rotated_width
        self.key_value_down = dense("key_value_down", (width, down), axes)
        self.key_norm = norm("key_norm", rank)
        axes = ("latent", "key_value_heads")
        self.key = dense("key", (rank, heads * unrotated), axes)
        self.value = dense("value", (rank, heads * value_width), axes)
        self.out = dense("out", (heads * value_width, width), ("heads", "embed"))

    def project(self, x: Float[Array, "n D"], angles: RotaryAngles | None) -> Projected:
        """Projects like `Attention.project`; devices share the compressed vectors."""
        rank = self.config.key_value_rank
        down = self.key_value_down(x)  # [n, key_value_rank + rotary_width]
        latent = normalize(self.key_norm, down[:, :rank])
        latent = collectives.copy_to_shards(latent, "heads")
        shared = collectives.copy_to_shards(down[:, rank:], "heads")
        query, rotated = self.queries(x), shared[:, None]  # [n, 1, rotary_width]
        if angles is not None:
            query, rotated = rotate_queries_and_keys(
                query, rotated, angles, interleaved=self.interleaved
            )
        count = (len(x), -1)
        unrotated = self.key(latent)  # [n, H * N]
        unrotated = unrotated.reshape(*count, self.head_width - rotated.shape[-1])
        rotated = jnp.broadcast_to(rotated, (*unrotated.shape[:2], rotated.shape[-1]))
        keys = jnp.concatenate([rotated, unrotated], axis=-1)  # [n, H, K]
        values = self.value(latent).reshape(*count, self.value_width)
        missing = self.head_width - self.value_width
        values = jnp.pad(values, ((0, 0), (0, 0), (0, missing)))
        return Projected(query, keys, values, None)

    def queries(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead H K"]:
        """Projects to unrotated queries."""
        if self.query_down is not None:
            x = normalize(self.query_norm, self.query_down(x))
        heads = self.query(collectives.copy_to_shards(x, "heads"))
        heads = heads.reshape(*x.shape[:-1], -1, self.head_width)
        return jnp.roll(heads, self.config.rotated_width, axis=-1)
