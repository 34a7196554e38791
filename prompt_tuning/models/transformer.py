"""Blocks, stacked and scanned, over one or more streams of rows.

A prompt that the batch shares is a stream `[N, P, D]` beside the text `[B, T, D]`,
which attends to both. What was run before (a cache, an encoder's output) comes in as
`Context`.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.masks import Count
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import (
    ParameterAxes,
    declare,
    fan_in,
    logical_axes,
    merge,
    named_key,
    split,
)
from prompt_tuning.core.rematerialization import (
    ALL_BUT_WEIGHTS,
    rematerialized,
    scan_blocks,
)
from prompt_tuning.models.attention import (
    KeyValues,
    relative_position_bucket,
    rotary_angles,
)
from prompt_tuning.models.block import Attention, Block
from prompt_tuning.models.host_memory import any_on_host, move_to_device
from prompt_tuning.models.layers import Norm
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import (
    AttentionView,
    Context,
    Stream,
    StreamView,
    apply_block_inputs,
    flatten_streams,
    position_numbers,
    split_streams,
)
from prompt_tuning.sharding import collectives


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
            config.encoder_policy if bidirectional else config.rematerialization
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
        block_input = [stream.block_input for stream in streams]
        values = tuple(entry and entry.values for entry in block_input)

        def body(hidden, layer):
            parameters, (values, past, cross, key) = layer
            hidden = apply_block_inputs(hidden, views, block_input, values)
            whole = collectives.gather_parameters(move_to_device(parameters), axes)
            block = cast(Block, merge(graph, whole))
            cross = block.cross_keys_values(cross, encoded)
            hidden, made = block(hidden, angles, numbers, views, past, cross, key)
            return hidden, made if keep else ()

        encoded = [
            None
            if isinstance(made, KeyValues)
            else collectives.copy_to_shards(made, "heads")
            for made in (context.key_values for context in cross)
        ]
        hidden = flatten_streams([stream.hidden for stream in streams])
        how = self.rematerialization
        if keep:
            # Cut in three, the blocks' keys and values would have to be joined again.
            how = how.without_skips()
        with jax.named_scope("blocks"):
            others = (
                values,
                _stacked_key_values(past),
                _stacked_key_values(cross),
                keys,
            )
            brings = _gathers_weights(axes) or any_on_host(parameters)
            hidden, made = scan_blocks(
                body, hidden, parameters, others, how, gathers=brings
            )
        return split_streams(hidden, views), made

    def prefix_contexts(self, rows: RowInfo) -> tuple[Context, ...]:
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
        encoded = collectives.copy_to_shards(encoded, "heads")

        def project(parameters):
            whole = collectives.gather_parameters(move_to_device(parameters), axes)
            return cast(Attention, merge(graph, whole)).keys_values(encoded)

        if _gathers_weights(axes) or any_on_host(parameters):
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
        return rotary_angles(flatten_streams(places), self.config)

    def _views(
        self,
        streams: Sequence[Stream],
        past: Sequence[Context],
        cross: Sequence[Context],
    ) -> tuple[StreamView, ...]:
        encoded = tuple(
            AttentionView(context.mask, context.rows, None) for context in cross
        )
        views = []
        for i, stream in enumerate(streams):
            earlier = [(c.mask, c.rows, c.positions) for c in past]
            earlier += [
                (s.context_mask, s.context_rows, s.key_positions) for s in streams[:i]
            ]
            seen = [
                AttentionView(mask, rows, self._bias(stream.positions, positions))
                for mask, rows, positions in earlier
            ]
            rows, length, _ = stream.hidden.shape
            # Within an example all positions count on, wherever the row starts it.
            places = jnp.arange(length)[None]
            own = AttentionView(stream.mask, None, self._bias(places, places))
            first, total = stream.row_range
            view = StreamView((rows, length), (*seen, own), encoded, first, total)
            views.append(view)
        return tuple(views)

    def _bias(self, queries, keys) -> Float[Array, "#R H Q S"] | None:
        if self.relative_position_bias is None:
            return None
        return self.relative_position_bias(queries, keys)


def _stacked_key_values(contexts: Sequence[Context]) -> tuple[KeyValues | None, ...]:
    """Keys and values of every block; None where each block makes its own."""
    found = [context.key_values for context in contexts]
    return tuple(made if isinstance(made, KeyValues) else None for made in found)


def _gathers_weights(axes: Mapping[str, ParameterAxes]) -> bool:
    """Whether any of some parameters is put together where it is used."""
    return any(
        collectives.needs_gather(known.names, path) for path, known in axes.items()
    )
