"""Latent attention: all heads' keys and values from one compressed vector.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Each position has a vector of
`key_value_rank` elements, from which each head computes its keys and values. All heads
share the rotated part of the keys. Queries may be compressed, too.

The cache keeps that vector and the rotated part of the key, as the values and keys of a
single head. A few queries read them in this form ("absorbed", section 2.1.2): a query
is multiplied by its head's projection to keys, so its product with the vector equals
its product with the key; the weighted mean of the vectors is projected to values
afterwards. For many queries it is cheaper to expand the vectors to keys and values of
all heads, which are then discarded. The cache itself is expanded if adapters change the
projections from the vectors, and after a trained prefix of keys and values
(`LatentAttention.in_form_of`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.core.recomputation import ATTENTION, named
from prompt_tuning.models import attention
from prompt_tuning.models.attention import AttentionSource, KeyValues, ScoreSettings
from prompt_tuning.models.attention_layer import Attention, Projected
from prompt_tuning.models.layers import dense_layers
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
        dense = dense_layers(key, config, layers)

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
        if self.compresses:
            return Projected(query, rotated, latent[:, None], None)
        expanded = self._by_head(rotated, self.key(latent), self.value(latent))
        return Projected(query, *expanded, None)

    @property
    def compresses(self) -> bool:
        """Whether no adapter changes the projections from compressed vectors."""
        return not (self.key.adapters or self.value.adapters)

    def in_form_of(
        self, past: Sequence[KeyValues | None], own: tuple[KeyValues, ...]
    ) -> tuple[KeyValues, ...]:
        """Expands keys and values behind expanded ones; see `Attention`."""
        if not past or past[-1] is None or self._is_compressed(past[-1]):
            return own
        return tuple(map(self.expand, own))

    def expand(self, key_values: KeyValues) -> KeyValues:
        """Returns keys and values of each head, `[H, R, S, K]`.

        Compressed ones are of rows without adapters of these projections.
        """
        if not self._is_compressed(key_values):
            return key_values
        shape = key_values.keys.shape[1:3]  # [R, S]
        rotated, latent = (x.reshape(-1, x.shape[-1]) for x in key_values)
        expanded = self._by_head(
            rotated[:, None], self.key.product(latent), self.value.product(latent)
        )
        by_row = (x.reshape(*shape, *x.shape[1:]) for x in expanded)
        return KeyValues.from_heads(*by_row)

    def weights(
        self, query: Float[Array, "R Q H K"], sources: Sequence[AttentionSource]
    ) -> Float[Array, "R Q _"]:
        """Computes the weights of a stream's keys; see `Attention`."""
        return super().weights(query, self._all_expanded(sources))

    def attend_and_project(
        self,
        queries: Sequence[Float[Array, "_ _ H K"]],
        sources: Sequence[Sequence[AttentionSource]],
        *others: Any,
    ) -> Float[Array, "n D"]:
        """Attends from each stream to its sources; see `Attention`."""
        if len(queries) > 1:  # the first one reads expanded keys in any case
            sources = list(map(self._all_expanded, sources))
        return super().attend_and_project(queries, sources, *others)

    def _is_compressed(self, key_values: KeyValues) -> bool:
        return key_values.keys.shape[-1] < self.head_width

    def _all_expanded(self, sources):
        return [x._replace(key_values=self.expand(x.key_values)) for x in sources]

    def _by_head(
        self,
        rotated: Float[Array, "n 1 rotated"],
        unrotated: Float[Array, "n HN"],
        values: Float[Array, "n HV"],
    ) -> tuple[Float[Array, "n H K"], Float[Array, "n H K"]]:
        """Returns the keys and values of all heads, from their projected elements."""
        count = (len(unrotated), -1)
        unrotated = unrotated.reshape(*count, self.head_width - rotated.shape[-1])
        rotated = jnp.broadcast_to(rotated, (*unrotated.shape[:2], rotated.shape[-1]))
        keys = jnp.concatenate([rotated, unrotated], axis=-1)  # [n, H, K]
        values = values.reshape(*count, self.value_width)
        missing = self.head_width - self.value_width
        return keys, jnp.pad(values, ((0, 0), (0, 0), (0, missing)))

    def _attend(self, query, sources, key, first_row):
        """Attends to compressed keys as they are if the queries are few."""
        *before, _ = (self._is_compressed(x.key_values) for x in sources)
        drops = key is not None and self.dropout_rate > 0
        if not any(before) or drops or query.shape[1] > self._most_absorbed:
            expanded = self._all_expanded(sources)
            return super()._attend(query, expanded, key, first_row)
        settings = ScoreSettings(self.scale, self.config.attention_soft_cap)
        rotated = self.config.rotated_width
        heads = (self.config.key_value_rank, query.shape[2], -1)
        absorbed = jnp.einsum(
            "rqhn,chn->rqhc",
            query[..., rotated:],
            self.key.wide_kernel().astype(query.dtype).reshape(heads),
        )
        absorbed = jnp.concatenate([query[..., :rotated], absorbed], axis=-1)
        compressed = [x for x in sources if self._is_compressed(x.key_values)]
        others = [x for x in sources if not self._is_compressed(x.key_values)]
        means, logarithms = attention.attend_with_sums(
            attention.groups_first(absorbed, 1), compressed, settings
        )
        attended = jnp.einsum(
            "rqhc,chv->rqhv",
            attention.positions_first(means),
            self.value.wide_kernel().astype(query.dtype).reshape(heads),
        )
        if others:
            groups = others[0].key_values.groups
            more, sums = attention.attend_with_sums(
                attention.groups_first(query, groups), others, settings
            )
            more = attention.positions_first(more)[..., : self.value_width]
            logarithms, sums = (
                attention.positions_first(x[..., None]) for x in (logarithms, sums)
            )
            # A row's share is exactly 0 of sources that it sees nothing of.
            share = jax.nn.softmax(jnp.stack([logarithms, sums]), axis=0)
            joined = share[0] * attended + share[1] * more
            attended = joined.astype(query.dtype)
        return named(attention.groups_first(attended, 1), ATTENTION)

    @property
    def _most_absorbed(self) -> int:
        """Number of queries up to which absorbed products take fewer operations.

        That is with as many keys before the queries. It depends on the config alone, so
        that a row does not depend on its neighbours.
        """
        config = self.config
        rank, width, rotated = (
            config.key_value_rank,
            config.head_width,
            config.rotated_width,
        )
        # To expand a key and a value, and to multiply and add, for each head.
        expanding = rank * (width - rotated + self.value_width)
        more = 2 * rank + rotated - (width + self.value_width)
        few = expanding / more / 2 if more > 0 else math.inf
        return int(min(few, attention.MAXIMUM_QUERIES))

    def queries(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead H K"]:
        """Projects to unrotated queries."""
        if self.query_down is not None:
            x = normalize(self.query_norm, self.query_down(x))
        heads = self.query(collectives.copy_to_shards(x, "heads"))
        heads = heads.reshape(*x.shape[:-1], -1, self.head_width)
        return jnp.roll(heads, self.config.rotated_width, axis=-1)
