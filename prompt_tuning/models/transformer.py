"""Blocks, stacked and scanned, over one or more streams of rows.

A *stream* is a set of rows that run through the blocks together. Usually there is one;
with a shared prompt there are two, the prompt `[1, P, D]` and the text `[B, T, D]`,
and the text attends to both. Keys that were computed earlier (a cache, an encoder's
output) come in as `Past`. Blocks know nothing of prompts, of masks or of decoding:
they let each stream see what its masks say.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.models.attention import (
    KeyValues,
    Source,
    attend,
    relative_position_bucket,
    rotary_angles,
    rotate,
)
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.layers import Dense, FeedForward, Norm, dropout
from prompt_tuning.models.parameters import (
    declare,
    fan_in,
    merge,
    named_key,
    optional_key,
    split,
)

# Of any number of keys: the sources that a stream sees differ in length.
Mask = Bool[Array, "#R 1 #Q _"] | None


@dataclasses.dataclass(frozen=True)
class Stream:
    """Rows that run through the blocks together.

    Attributes:
      hidden: `[R, Q, D]`; `R` is `B`, or 1 for a stream that the batch shares.
      positions: `[1 or R, Q]`, of the rotary embedding, the learned table or the bias.
      masks: one for each source that the stream sees, None where it sees all of it:
        first every past source, then every stream up to and including itself.
      cross_mask: what it sees of the encoder's output.
      later_mask: what a token generated later sees of this stream, None for all.
    """

    hidden: Float[Array, "R Q D"]
    positions: Int[Array, "#R Q"]
    masks: tuple[Mask, ...]
    cross_mask: Mask = None
    later_mask: Mask = None


class Past(NamedTuple):
    """Keys and values computed earlier, of all blocks: `[L, R, S, G, K]`.

    `positions` `[1 or R, S]` are those of the keys, for the relative position bias.
    """

    key_values: KeyValues
    positions: Int[Array, "#R S"]


class _View(NamedTuple):
    """What every block needs of a stream beside its hidden states."""

    angles: tuple[Array, Array] | None
    masks: tuple[Mask, ...]
    biases: tuple[Float[Array, "1 H Q S"] | None, ...]
    cross_mask: Mask


class Attention(nnx.Module):
    """The four projections of attention in every block.

    Attributes:
      query: `[L, D, H * K]`.
      key: `[L, D, G * K]`.
      value: `[L, D, G * K]`.
      out: `[L, H * K, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.heads, self.groups = config.heads, config.key_value_heads
        self.dropout_rate = config.dropout_rate
        self.scale = config.head_width**-0.5 if config.scale_scores else 1.0
        inner = config.heads * config.head_width
        shared = config.key_value_heads * config.head_width

        def dense(name, sizes, axes, scale=1.0):
            biased = ("all",) if name == "out" else ("all", "qkv")
            return Dense(
                named_key(key, name),
                sizes,
                axes,
                layers=layers,
                bias=config.biases in biased,
                dtype=config.parameter_dtype,
                scale=scale,
            )

        # T5 has no 1/sqrt(K) at run time; its query starts that much smaller.
        start = 1.0 if config.scale_scores else config.head_width**-0.5
        self.query = dense("query", (config.width, inner), ("embed", "heads"), start)
        self.key = dense("key", (config.width, shared), ("embed", "key_value_heads"))
        self.value = dense(
            "value", (config.width, shared), ("embed", "key_value_heads")
        )
        self.out = dense("out", (inner, config.width), ("heads", "embed"))

    def queries(self, x: Float[Array, "R Q D"]) -> Float[Array, "R Q H K"]:
        """Projects to queries."""
        return self.query(x).reshape(*x.shape[:2], self.heads, -1)

    def keys_values(self, x: Float[Array, "R S D"]) -> KeyValues:
        """Projects to keys and values."""
        shape = (*x.shape[:2], self.groups, -1)
        return KeyValues(self.key(x).reshape(shape), self.value(x).reshape(shape))

    def mix(
        self,
        query: Float[Array, "R Q H K"],
        sources: Sequence[Source],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "R Q D"]:
        """Attends to all sources and projects back to the model's width."""
        mixed = attend(
            query,
            sources,
            scale=self.scale,
            dropout_rate=self.dropout_rate,
            key=key,
        )
        return self.out(mixed.reshape(*mixed.shape[:2], -1))


class Block(nnx.Module):
    """Norm, attention, (norm, cross-attention,) norm, feed-forward; all residual."""

    def __init__(
        self, key: Key[Array, ""], config: ModelConfig, *, layers: int, cross: bool
    ):
        self.dropout_rate = config.dropout_rate

        def norm(name):
            return Norm(named_key(key, name), config, stacked=layers)

        def attention(name):
            return Attention(named_key(key, name), config, layers=layers)

        self.self_attention_norm = norm("self_attention_norm")
        self.self_attention = attention("self_attention")
        self.cross_attention_norm = norm("cross_attention_norm") if cross else None
        self.cross_attention = attention("cross_attention") if cross else None
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FeedForward(named_key(key, "mlp"), config, layers=layers)

    def __call__(
        self,
        hidden: tuple[Float[Array, "_ _ D"], ...],
        views: tuple[_View, ...],
        past: tuple[KeyValues, ...],
        cross: KeyValues | None,
        key: Key[Array, ""] | None,
    ) -> tuple[tuple[Float[Array, "_ _ D"], ...], tuple[KeyValues, ...]]:
        """Runs one block on every stream.

        Returns:
          the streams' hidden states, and the keys and values that each of them made.
        """
        keys = [optional_key(key, f"stream_{i}") for i in range(len(hidden))]
        queries, fresh = [], []
        for x, view in zip(hidden, views, strict=True):
            normed = self.self_attention_norm(x)
            query, made = (
                self.self_attention.queries(normed),
                self.self_attention.keys_values(normed),
            )
            if view.angles is not None:
                query = rotate(query, view.angles)
                made = KeyValues(rotate(made.keys, view.angles), made.values)
            queries.append(query)
            fresh.append(made)
        after = []
        for i, (x, query, view) in enumerate(zip(hidden, queries, views, strict=True)):
            visible = (*past, *fresh[: i + 1])
            sources = [
                Source(*triple)
                for triple in zip(visible, view.masks, view.biases, strict=True)
            ]
            x = self._add_self_attention(x, query, sources, keys[i])
            if cross is not None:
                x = self._add_cross_attention(x, cross, view.cross_mask, keys[i])
            after.append(self._add_feed_forward(x, keys[i]))
        return tuple(after), tuple(fresh)

    def _add_self_attention(self, x, query, sources, key):
        mixed = self.self_attention.mix(query, sources, optional_key(key, "self"))
        return x + dropout(mixed, self.dropout_rate, optional_key(key, "self_out"))

    def _add_cross_attention(self, x, cross, mask, key):
        assert self.cross_attention is not None  # a decoder of an encoder-decoder
        assert self.cross_attention_norm is not None
        query = self.cross_attention.queries(self.cross_attention_norm(x))
        mixed = self.cross_attention.mix(
            query, [Source(cross, mask, None)], optional_key(key, "cross")
        )
        return x + dropout(mixed, self.dropout_rate, optional_key(key, "cross_out"))

    def _add_feed_forward(self, x, key):
        mixed = self.mlp(self.mlp_norm(x), optional_key(key, "mlp"))
        return x + dropout(mixed, self.dropout_rate, optional_key(key, "mlp_out"))


class RelativePositionBias(nnx.Module):
    """T5's bias, one table for a whole stack.

    Attributes:
      embedding: `[H, buckets]`.
    """

    def __init__(
        self, key: Key[Array, ""], config: ModelConfig, *, bidirectional: bool
    ):
        self.bidirectional = bidirectional
        self.buckets = config.relative_buckets
        self.maximum = config.relative_maximum_distance
        self.embedding = declare(
            key,
            (config.heads, config.relative_buckets),
            ("heads", "relative_buckets"),
            fan_in(config.width),
            config.parameter_dtype,
        )

    def __call__(
        self, queries: Int[Array, "Q"], keys: Int[Array, "S"]
    ) -> Float[Array, "1 H Q S"]:
        """The bias of every query position on every key position."""
        bucket = relative_position_bucket(
            keys[None, :] - queries[:, None],
            bidirectional=self.bidirectional,
            buckets=self.buckets,
            maximum=self.maximum,
        )
        return jnp.take(self.embedding[...], bucket, axis=1)[None]


class Stack(nnx.Module):
    """All blocks of an encoder or a decoder, and the norm after them.

    Attributes:
      layers: the blocks, every parameter stacked on `L`.
      final_norm: applied by the caller, on the positions that it needs.
      relative_position_bias: T5's, else None.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        layers: int,
        cross: bool,
        bidirectional: bool,
    ):
        self.config = config
        self.count = layers
        self.layers = Block(
            named_key(key, "layers"), config, layers=layers, cross=cross
        )
        self.final_norm = Norm(named_key(key, "final_norm"), config, stacked=None)
        self.relative_position_bias = (
            RelativePositionBias(
                named_key(key, "relative_position_bias"),
                config,
                bidirectional=bidirectional,
            )
            if config.positions == "relative"
            else None
        )

    def run(
        self,
        streams: Sequence[Stream],
        *,
        past: Sequence[Past] = (),
        cross: KeyValues | None = None,
        key: Key[Array, ""] | None = None,
        keep: bool = False,
    ) -> tuple[tuple[Float[Array, "R Q D"], ...], tuple[KeyValues, ...]]:
        """Runs the streams through all blocks.

        Args:
          streams: in the order in which they may see each other.
          past: keys and values computed earlier, of all blocks.
          cross: keys and values of the encoder's output, of all blocks.
          key: for dropout; None for none.
          keep: whether the streams' own keys and values are returned, for a cache.

        Returns:
          hidden states of each stream before the final norm, and what it made of keys
          and values, stacked on `L` (empty unless `keep`).
        """
        views = tuple(
            self._view(stream, i, streams, past) for i, stream in enumerate(streams)
        )
        graph, parameters = split(self.layers)
        keys = None if key is None else jax.random.split(key, self.count)

        def body(hidden, layer):
            parameters, past_key_values, cross, key = layer
            block = cast(Block, merge(graph, parameters))
            hidden, made = block(hidden, views, past_key_values, cross, key)
            return hidden, made if keep else ()

        hidden = tuple(stream.hidden for stream in streams)
        cached = tuple(source.key_values for source in past)
        with jax.named_scope("blocks"):
            return jax.lax.scan(body, hidden, (parameters, cached, cross, keys))

    def cross_keys_values(self, encoded: Float[Array, "B S D"]) -> KeyValues:
        """Keys and values of an encoder's output for every block, `[L, B, S, G, K]`."""
        assert self.layers.cross_attention is not None
        graph, parameters = split(self.layers.cross_attention)

        def project(parameters):
            attention = cast(Attention, merge(graph, parameters))
            return attention.keys_values(encoded)

        return jax.vmap(project)(parameters)

    def _view(self, stream, index, streams, past) -> _View:
        angles = None
        if self.config.positions == "rotary":
            angles = rotary_angles(stream.positions, self.config)
        sources = [*past, *streams[: index + 1]]
        biases = (None,) * len(sources)
        if self.relative_position_bias is not None:
            biases = tuple(
                self.relative_position_bias(stream.positions[0], source.positions[0])
                for source in sources
            )
        return _View(angles, stream.masks, biases, stream.cross_mask)
