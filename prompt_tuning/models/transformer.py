"""Stacks of blocks, scanned, over one or more streams of rows.

A prompt shared by the batch is a stream `[N, P, D]` next to the text `[B, T, D]`, which
attends to both. Earlier keys and values (a cache, an encoder) are passed as `Context`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core import intermediates
from prompt_tuning.core.block_scan import scan_blocks, scan_mixed
from prompt_tuning.core.layer_kinds import KEYS, MIXERS, USUAL, kept_by, layer_kinds
from prompt_tuning.core.masks import Count
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import logical_axes, merge, named_key, split
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.models import disentangled, relative_positions, rotary, source_keys
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.attention_choice import choose_attention, is_fusable
from prompt_tuning.models.block import Block
from prompt_tuning.models.host_memory import any_on_host, move_to_device
from prompt_tuning.models.latent_attention import LatentAttention
from prompt_tuning.models.layer_inputs import LayerInputs, first_inputs
from prompt_tuning.models.norms import Norm
from prompt_tuning.models.position_marks import positions_of
from prompt_tuning.models.recurrent_state import last_state
from prompt_tuning.models.relative_positions import RelativePositionBias
from prompt_tuning.models.rotary import RotaryAngles
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import (
    AttentionView,
    BlockValues,
    Context,
    Kept,
    Stream,
    StreamView,
    apply_block_inputs,
    bias_of_buckets,
    flatten_streams,
    kept_by_stream,
    key_count,
    mask_of_rows,
    position_numbers,
    split_streams,
    state_view,
)
from prompt_tuning.sharding import collectives, shard_map


class Stack(nnx.Module):
    """All blocks of an encoder or a decoder, and the norm after them.

    To add prompts, override the methods below `run`.

    Attributes:
      stack: "encoder" or "decoder".
      kinds: parts of each block; see `layer_kinds`.
      layers: the blocks, every parameter stacked on `L`, or on the blocks that have it.
      final_norm: norm that the caller applies at the positions it needs; None if each
        block ends with a norm.
      relative_position_bias: T5's bias, or None.
      relative_vectors: DeBERTa's vectors of relative positions, or None.
      layer_inputs: computes extra inputs of blocks, or None; see the module.
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
        self.config, self.count = config, layers
        self.stack = "encoder" if bidirectional else "decoder"
        self.bidirectional = bidirectional or config.bidirectional
        self.windowed_layers = (
            config.encoder_windowed_layers if bidirectional else config.windowed_layers
        )
        self.rematerialization = (
            config.encoder_policy if bidirectional else config.rematerialization
        )
        self.kinds = (USUAL,) * layers if bidirectional else layer_kinds(config)
        self.layers = Block(
            named_key(key, "layers"), config, kinds=self.kinds, cross=cross
        )
        self.final_norm = (
            None
            if config.norm_placement == "after_sum"
            else Norm(named_key(key, "final_norm"), config, stacked=None)
        )
        self.relative_position_bias = (
            RelativePositionBias(
                named_key(key, "relative_position_bias"),
                config,
                layers=layers,
                bidirectional=self.bidirectional,
            )
            if config.positions == "relative"
            else None
        )
        self.relative_vectors = disentangled.relative_vectors(key, config)
        self.layer_inputs = (
            LayerInputs(key, config) if config.layer_input_width else None
        )

    def run(
        self,
        streams: Sequence[Stream],
        *,
        past: Sequence[Context] = (),
        cross: Sequence[Context] = (),
        key: Key[Array, ""] | None = None,
        keep: bool = False,
    ) -> tuple[list[Float[Array, "_ _ D"]], tuple[Kept, ...]]:
        """Runs streams through all blocks.

        Args:
          streams: the streams; each attends to itself and the earlier ones, and
            continues the states of the one before it.
          past: keys, values and states that precede each row, computed earlier.
          cross: an encoder's output.
          key: random key for dropout.
          keep: whether to return what the streams leave for later ones.

        Returns:
          each stream's hidden states before the final norm, and what it leaves.
        """
        views, axes = self._views(streams, past, cross), logical_axes(self.layers)
        keys = None if key is None else jax.random.split(key, self.count)
        angles, numbers = self._angles(streams), position_numbers(views)
        block_inputs = [stream.block_input for stream in streams]
        input_values = tuple(change and change.values for change in block_inputs)

        def body(graph, kind, carry, layer):
            hidden, captured, shared = carry
            # `layer` is one block's slice of everything that is stacked on L.
            parameters, (input_values, cross, key, values, number, extra), past = layer
            hidden = apply_block_inputs(hidden, views, block_inputs, input_values)
            whole = move_to_device(parameters)
            whole = shard_map.gather_parameters(whole, axes)
            block = cast(Block, merge(graph, whole))
            cross = block.cross_keys_values(cross, encoded, key)
            skip_norm = number == 0 if self.config.unnormed_first else None
            turned = angles and angles.of_table(values.rotary_table)
            own_views = tuple(view.in_block(values) for view in views)
            reused, past = source_keys.reused_keys(kind, shared, before, past)
            inputs = turned, numbers, own_views, past, cross, key
            with intermediates.collect_block(captured, number) as captured:
                hidden, kept = block(hidden, *inputs, skip_norm, reused, extra)
            carry = hidden, captured, source_keys.with_shared_keys(shared, kind, kept)
            return carry, kept if keep else {}

        encoded = source_keys.encoder_outputs(cross)
        hidden, extra = first_inputs(self.layer_inputs, streams)
        shared, before = source_keys.shared_keys(self.config, views, past)
        size = self.count, hidden, key_count(streams, past)
        captured = intermediates.start_capture(self.stack, *size)
        numbered = captured or self.config.unnormed_first
        policy = self.rematerialization
        policy = policy.for_each_block() if keep else policy  # else keys are joined
        with jax.named_scope("blocks"), positions_of(streams, cross):
            others = (
                input_values,
                source_keys.stacked_key_values(cross),
                keys,
                self._block_values(),
                jnp.arange(self.count) if numbered else None,
                extra,
            )
            (hidden, captured, _), kept = self._scan(
                body, (hidden, captured, shared), others, past, policy
            )
        of_rows = {p: split_streams(x, views)[-1] for p, x in captured.items()}
        intermediates.provide(of_rows)
        kept = {KEYS: source_keys.empty_keys(self.config, views, 0)} | kept
        return split_streams(hidden, views), kept_by_stream(kept) if keep else ()

    def _scan(
        self,
        body: Callable[..., tuple[Any, Any]],
        carry: Any,
        others: Any,
        past: Sequence[Context],
        policy: Rematerialization,
    ) -> tuple[Any, dict[str, Any]]:
        """Runs the blocks; returns the carry, and what they return, by `kept_by`.

        Args:
          body: `f(graph, kind, carry, layer)`; `layer` has one block's parameters, its
            `others` and what precedes its streams.
          carry: input of the first block.
          others: inputs of each block, stacked on `L`.
          past: keys, values and states that precede each row.
          policy: what is saved for the backward pass.
        """
        graph, parameters = split(self.layers)
        names = {name for kind in self.kinds for name in kept_by(kind)}
        preceding: dict[str, Any] = dict.fromkeys(
            names - {KEYS}, last_state([context.state for context in past])
        )
        if KEYS in names:
            preceding[KEYS] = source_keys.stacked_key_values(past)
        kinds = dict.fromkeys(self.kinds)
        if len(kinds) == 1:
            [kind] = kinds
            return scan_blocks(
                lambda carry, layer: body(graph, kind, carry, (layer[0], *layer[1])),
                carry,
                parameters,
                (others, preceding),
                policy,
                gathers=source_keys.gathers_weights(logical_axes(self.layers))
                or any_on_host(parameters),
            )
        structures = {
            kind: split(self.layers.of_kind(kind, self.kinds))[0] for kind in kinds
        }
        bodies = {
            kind: functools.partial(body, structures[kind], kind) for kind in kinds
        }
        return scan_mixed(
            bodies, carry, self.kinds, parameters, others, preceding, policy
        )

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """Returns the stream that runs once, ahead of all rows; None here."""
        del key
        return None

    def visible_to(self, stream: Stream, rows: RowInfo) -> Stream:
        """Returns the stream of `prefix_stream` as rows of text attend to it."""
        del rows
        return stream

    def prefix_contexts(self, rows: RowInfo) -> tuple[Context, ...]:
        """Returns the trained keys and values that precede each row; none here."""
        del rows
        return ()

    def prompt_count(self) -> Count:
        """Number of prompt vectors within each example's positions."""
        return 0

    def cross_keys_values(
        self,
        encoded: Float[Array, "B S D"],
        key: Key[Array, ""] | None = None,
        *,
        shared: bool = False,
    ) -> KeyValues:
        """Computes every block's keys and values of an encoder's output.

        They are `[L, G, B, S, K]`. `shared` tells the output of shared prompts from
        that of the batch's rows.
        """
        assert self.layers.cross_attention is not None
        encoded = collectives.copy_to_shards(encoded, "heads")
        keys = None if key is None else jax.random.split(key, self.count)
        return source_keys.in_each_block(
            self.layers.cross_attention,
            lambda attention, key: attention.encoded_source(encoded, key, shared),
            keys,
        )

    def expanded(self, key_values: KeyValues) -> KeyValues:
        """Returns keys and values of all blocks and heads, from compressed ones too."""
        attention = self.layers.self_attention
        if not isinstance(attention, LatentAttention):
            return key_values
        return source_keys.in_each_block(attention, LatentAttention.expand, key_values)

    @property
    def compresses(self) -> bool:
        """Whether compressed keys and values are kept, unless a prefix precedes."""
        attention = self.layers.self_attention
        return isinstance(attention, LatentAttention) and attention.compresses

    def _angles(self, streams: Sequence[Stream]) -> RotaryAngles | None:
        if self.config.positions != "rotary":
            return None
        # Of each stream, [R, Q].
        positions = [
            jnp.broadcast_to(stream.positions, stream.hidden.shape[:2])
            for stream in streams
        ]
        return rotary.rotary_angles(flatten_streams(positions), self.config)

    def _block_values(self) -> BlockValues:
        config, bias = self.config, self.relative_position_bias
        reach = table = None
        if self.windowed_layers:
            assert config.window is not None
            reach = np.full(self.count, np.iinfo(np.int32).max)
            # A causal window counts the token itself, one in both directions does not.
            within = config.window + self.bidirectional
            reach[list(self.windowed_layers)] = within
            reach = jnp.asarray(reach, jnp.int32)
        if any(rotary.rotary_table_indices(config)):
            table = jnp.asarray(rotary.rotary_table_indices(config))
        bias_table = None
        if bias is not None and bias.in_each_block:
            bias_table = bias.embedding[...]
        return BlockValues(reach, table, bias_table)

    def _views(
        self,
        streams: Sequence[Stream],
        past: Sequence[Context],
        cross: Sequence[Context],
    ) -> tuple[StreamView, ...]:
        kernel, views = choose_attention(self.config).kernel, []
        for i, stream in enumerate(streams):
            earlier = [(c.mask, c.rows, c.positions, c.row_count) for c in past]
            earlier += [
                (s.context_mask, s.context_rows, s.key_positions, len(s.hidden))
                for s in streams[:i]
            ]
            rows, length, _ = stream.hidden.shape
            preceding = [
                self._view(
                    mask_of_rows(mask, rows), chosen, stream.positions, positions
                )._replace(shared=count == 1)
                for mask, chosen, positions, count in earlier
            ]
            encoded = tuple(
                AttentionView(mask_of_rows(context.mask, rows), context.rows, None)
                for context in cross
            )
            # Differences of positions are the same wherever an example starts.
            positions = jnp.arange(length)[None]  # [1, Q]
            if self.config.chunked:  # but chunks begin at certain ones
                positions = stream.positions
            within = self._view(stream.mask, None, positions, positions)
            if kernel is None or not is_fusable((*preceding, within), kernel):
                within = within.with_mask_array(length)
            first, total = stream.row_range
            view = StreamView(
                (rows, length), (*preceding, within), encoded, first, total
            )
            if self.relative_vectors is not None:
                view = view._replace(relative=self.relative_vectors.within(length))
            if any(MIXERS.keys() & {*kind} for kind in self.kinds):
                view = view._replace(state=state_view(streams, i, past))
            views.append(view)
        return tuple(views)

    def _view(self, mask, rows, queries, keys) -> AttentionView:
        """Returns the view of one source, given the positions of queries and keys."""
        distance = bias = buckets = None
        if self.windowed_layers and keys is not None:
            distance = relative_positions.window_distance(
                queries, keys, self.config, self.bidirectional
            )
        if self.relative_position_bias is not None and keys is not None:
            buckets = self.relative_position_bias.bucket(queries, keys)
            if not self.relative_position_bias.in_each_block:
                table = self.relative_position_bias.embedding[...]
                bias, buckets = bias_of_buckets(table, buckets), None
        if self.config.positions == "alibi" and keys is not None:
            bias = relative_positions.linear_bias(queries, keys, self.config.heads)
        return AttentionView(mask, rows, bias, distance, buckets)
