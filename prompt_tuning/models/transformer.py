"""Blocks, stacked and scanned, over one or more streams of rows.

A prompt that the batch shares is a stream `[N, P, D]` beside the text `[B, T, D]`,
which attends to both. What every position goes through alone (norms, projections, the
feed-forward layer) runs on all streams as one `[positions, D]`, so that each weight is
read once. What was run before (a cache, an encoder's output) comes in as `Context`.
Blocks know nothing of prompts or of decoding: a stream sees what its masks say.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.masks import Count
from prompt_tuning.models.attention import (
    KeyValues,
    Source,
    attend,
    relative_position_bucket,
    rotary_angles,
    rotate,
)
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.host_memory import on_device, on_host
from prompt_tuning.models.layers import Dense, FeedForward, Norm
from prompt_tuning.models.noise import Places, dropout
from prompt_tuning.models.parameters import (
    ParameterAxes,
    declare,
    fan_in,
    logical_axes,
    merge,
    named_key,
    optional_key,
    split,
)
from prompt_tuning.models.rematerialization import (
    ALL_BUT_WEIGHTS,
    ATTENTION,
    named,
    rematerialized,
    scan_blocks,
)
from prompt_tuning.models.rows import Rows
from prompt_tuning.models.streams import (
    Context,
    Seen,
    Stream,
    View,
    apart,
    entered,
    joined,
    position_numbers,
)
from prompt_tuning.parallel import parts


class Attention(nnx.Module):
    """The four projections of attention in every block.

    Attributes:
      query: `[L, D, H * K]`.
      key: `[L, D, G * K]`.
      value: `[L, D, G * K]`.
      out: `[L, H * K, D]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.head_width = config.head_width
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

    def queries(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead H K"]:
        """Projects to queries; on a mesh, of this device's heads."""
        return self.query(x).reshape(*x.shape[:-1], -1, self.head_width)

    def keys_values(self, x: Float[Array, "*lead D"]) -> KeyValues:
        """Projects to keys and values."""
        shape = (*x.shape[:-1], -1, self.head_width)
        made = (self.key(x).reshape(shape), self.value(x).reshape(shape))
        return KeyValues(*map(parts.own_groups, made))

    def mix(
        self,
        queries: Sequence[Float[Array, "_ _ H K"]],
        sources: Sequence[Sequence[Source]],
        first_rows: Sequence[Int[Array, ""] | int],
        key: Key[Array, ""] | None,
    ) -> Float[Array, "n D"]:
        """Attends, each stream to its sources, and projects back to the model's width.

        Args:
          queries: of each stream.
          sources: what each stream sees.
          first_rows: the number of each stream's first row in the whole batch.
          key: for dropout; None for none.

        Returns:
          all positions of all streams.
        """
        mixed = [
            attend(
                query,
                seen,
                scale=self.scale,
                dropout_rate=self.dropout_rate,
                key=optional_key(key, f"stream_{i}"),
                first_row=first,
            )
            for i, (query, seen, first) in enumerate(
                zip(queries, sources, first_rows, strict=True)
            )
        ]
        flat = named(joined(mixed), ATTENTION)
        return self.out(flat.reshape(len(flat), -1))


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
        x: Float[Array, "n D"],
        angles: tuple[Array, Array] | None,
        numbers: Int[Array, "n"],
        views: tuple[View, ...],
        past: tuple[KeyValues, ...],
        cross: tuple[KeyValues, ...],
        key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "n D"], tuple[KeyValues, ...]]:
        """Runs one block.

        Args:
          x: all positions of all streams.
          angles: of the rotary embedding, or None.
          numbers: of all positions in the whole batch.
          views: the streams.
          past: keys and values that stand before the streams' own.
          cross: keys and values of an encoder's output.
          key: for dropout; None for none.

        Returns:
          the positions, and the keys and values that each stream made.
        """
        normed = parts.entered(self.self_attention_norm(x), "heads")
        query, made = (
            self.self_attention.queries(normed),
            self.self_attention.keys_values(normed),
        )
        if angles is not None:
            query = rotate(query, angles)
            made = KeyValues(rotate(made.keys, angles), made.values)
        query = named(query, "query")
        keys, values = (
            apart(named(part, name), views)
            for part, name in zip(made, ("keys", "values"), strict=True)
        )
        fresh = tuple(map(KeyValues, keys, values))
        sources = [
            [
                seen.source(made)
                for seen, made in zip(
                    view.itself, (*past, *fresh[: i + 1]), strict=True
                )
            ]
            for i, view in enumerate(views)
        ]
        first_rows = [view.first_row for view in views]
        mixed = self.self_attention.mix(
            apart(query, views), sources, first_rows, optional_key(key, "self")
        )
        places = Places.of_positions(numbers, x.shape[-1])

        def drop(x, name):
            return dropout(x, self.dropout_rate, optional_key(key, name), places)

        x = x + drop(mixed, "self_out")
        if cross:
            mixed = self._mixed_cross_attention(x, views, cross, key)
            x = x + drop(mixed, "cross_out")
        mixed = self.mlp(self.mlp_norm(x), optional_key(key, "mlp"), numbers)
        return x + drop(mixed, "mlp_out"), fresh

    def crossed(
        self,
        made: Sequence[KeyValues | None],
        encoded: Sequence[Float[Array, "_ _ D"] | None],
    ) -> tuple[KeyValues, ...]:
        """Keys and values of encoders' outputs: as they were made before, or now."""
        found = []
        for before, output in zip(made, encoded, strict=True):
            if before is None:
                assert self.cross_attention is not None and output is not None
                before = self.cross_attention.keys_values(output)
            found.append(before)
        return tuple(found)

    def _mixed_cross_attention(self, x, views, cross, key):
        assert self.cross_attention is not None  # a decoder of an encoder-decoder
        assert self.cross_attention_norm is not None
        normed = parts.entered(self.cross_attention_norm(x), "heads")
        query = self.cross_attention.queries(normed)
        sources = [
            [view.cross[j].source(made) for j, made in enumerate(cross)]
            for view in views
        ]
        first_rows = [view.first_row for view in views]
        return self.cross_attention.mix(
            apart(query, views), sources, first_rows, optional_key(key, "cross")
        )


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
        self, queries: Int[Array, "#R Q"], keys: Int[Array, "#R S"]
    ) -> Float[Array, "#R H Q S"]:
        """The bias of every query position on every key position of its row."""
        bucket = relative_position_bucket(
            keys[:, None, :] - queries[:, :, None],
            bidirectional=self.bidirectional,
            buckets=self.buckets,
            maximum=self.maximum,
        )
        # A product with ones and zeros: `Q * S` single numbers to look up are slow.
        hot = jax.nn.one_hot(bucket, self.buckets, dtype=self.embedding.dtype)
        return jnp.einsum("rqsb,hb->rhqs", hot, self.embedding[...])


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
        self.rematerialization = (
            config.of_encoder if bidirectional else config.rematerialization
        )
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
        past: Sequence[Context] = (),
        cross: Sequence[Context] = (),
        key: Key[Array, ""] | None = None,
        keep: bool = False,
    ) -> tuple[list[Float[Array, "_ _ D"]], tuple[KeyValues, ...]]:
        """Runs streams through all blocks.

        Args:
          streams: each sees those before it.
          past: what was run before, and stands before each row.
          cross: an encoder's output.
          key: for dropout; None for none.
          keep: whether the streams' own keys and values are returned.

        Returns:
          hidden states of each stream before the final norm, and what it made of keys
          and values, stacked on `L` (none unless `keep`).
        """
        views = self._views(streams, past, cross)
        graph, parameters = split(self.layers)
        axes = logical_axes(self.layers)
        keys = None if key is None else jax.random.split(key, self.count)
        angles, numbers = self._angles(streams), position_numbers(views)
        at_blocks = [stream.at_blocks for stream in streams]
        values = tuple(entry and entry.values for entry in at_blocks)

        def body(hidden, layer):
            parameters, (values, past, cross, key) = layer
            hidden = entered(hidden, views, at_blocks, values)
            whole = parts.gathered(on_device(parameters), axes)
            block = cast(Block, merge(graph, whole))
            cross = block.crossed(cross, encoded)
            hidden, made = block(hidden, angles, numbers, views, past, cross, key)
            return hidden, made if keep else ()

        encoded = [
            None if isinstance(made, KeyValues) else parts.entered(made, "heads")
            for made in (context.key_values for context in cross)
        ]
        hidden = joined([stream.hidden for stream in streams])
        how = self.rematerialization
        if keep:
            # Cut in three, the blocks' keys and values would have to be joined again.
            how = how.of_all_blocks()
        with jax.named_scope("blocks"):
            others = (values, _made_before(past), _made_before(cross), keys)
            brings = _gathers(axes) or on_host(parameters)
            hidden, made = scan_blocks(
                body, hidden, parameters, others, how, gathers=brings
            )
        return apart(hidden, views), made

    def given(self, rows: Rows) -> tuple[Context, ...]:
        """Keys and values that no stream makes and that stand before each row: none."""
        del rows
        return ()

    def prompt_count(self) -> Count:
        """Positions that stand among each example's text."""
        return 0

    def cross_keys_values(self, encoded: Float[Array, "B S D"]) -> KeyValues:
        """Keys and values of an encoder's output for every block, `[L, B, S, G, K]`."""
        assert self.layers.cross_attention is not None
        graph, parameters = split(self.layers.cross_attention)
        axes = logical_axes(self.layers.cross_attention)
        encoded = parts.entered(encoded, "heads")

        def project(parameters):
            whole = parts.gathered(on_device(parameters), axes)
            return cast(Attention, merge(graph, whole)).keys_values(encoded)

        if _gathers(axes) or on_host(parameters):
            project = rematerialized(project, ALL_BUT_WEIGHTS, in_scan=True)
        # One block after the other: together they would cast all kernels at once.
        return jax.lax.map(project, parameters)

    def _angles(self, streams: Sequence[Stream]) -> tuple[Array, Array] | None:
        """Of the rotary embedding, for all positions of all streams."""
        if self.config.positions != "rotary":
            return None
        places = [
            jnp.broadcast_to(stream.positions, stream.hidden.shape[:2])
            for stream in streams
        ]
        return rotary_angles(joined(places), self.config)

    def _views(
        self,
        streams: Sequence[Stream],
        past: Sequence[Context],
        cross: Sequence[Context],
    ) -> tuple[View, ...]:
        encoded = tuple(Seen(context.mask, context.rows, None) for context in cross)
        views = []
        for i, stream in enumerate(streams):
            earlier = [(c.mask, c.rows, c.positions) for c in past]
            earlier += [
                (s.later_mask, s.later_rows, s.seen_positions) for s in streams[:i]
            ]
            seen = [
                Seen(mask, rows, self._bias(stream.positions, positions))
                for mask, rows, positions in earlier
            ]
            rows, length, _ = stream.hidden.shape
            # Within an example all positions count on, wherever the row starts it.
            places = jnp.arange(length)[None]
            own = Seen(stream.mask, None, self._bias(places, places))
            first, total = stream.row_range
            view = View((rows, length), (*seen, own), encoded, first, total)
            views.append(view)
        return tuple(views)

    def _bias(self, queries, keys) -> Float[Array, "#R H Q S"] | None:
        if self.relative_position_bias is None:
            return None
        return self.relative_position_bias(queries, keys)


def _made_before(contexts: Sequence[Context]) -> tuple[KeyValues | None, ...]:
    """Keys and values of every block; None where each block makes its own."""
    found = [context.key_values for context in contexts]
    return tuple(made if isinstance(made, KeyValues) else None for made in found)


def _gathers(axes: Mapping[str, ParameterAxes]) -> bool:
    """Whether any of some parameters is put together where it is used."""
    return any(parts.gathers(known.names, path) for path, known in axes.items())
