"""One block: mixers of positions, then a feed-forward layer, each with a residual.

A mixer is attention over sources or a recurrent layer (`core.layer_kinds`).
Position-wise layers (norms, projections, the feed-forward layer) run on all streams as
one `[positions, D]`, so each weight is read once. A block knows nothing about prompts
or decoding: its stream views say which keys each stream attends to and which state it
continues.
"""

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core.adapted_rows import branch_draws
from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.intermediates import ATTENTION_WEIGHTS, is_requested, record
from prompt_tuning.core.layer_kinds import (
    ATTENTION,
    DENSE,
    FEED_FORWARD,
    FULL_ATTENTION,
    KEYS,
    SHARING,
)
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import merge, named_key, optional_key, split
from prompt_tuning.core.recomputation import named
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.attention_layer import Attention
from prompt_tuning.models.experts import MixtureOfExperts
from prompt_tuning.models.gated_delta import GatedDelta
from prompt_tuning.models.latent_attention import LatentAttention
from prompt_tuning.models.layer_inputs import LayerInput, layer_factor
from prompt_tuning.models.layers import FeedForward
from prompt_tuning.models.lightning import Lightning
from prompt_tuning.models.mamba import Mamba
from prompt_tuning.models.mamba2 import Mamba2
from prompt_tuning.models.memory_mixer import MemoryMixer
from prompt_tuning.models.norms import Norm, normalize
from prompt_tuning.models.recurrent_state import RecurrentState
from prompt_tuning.models.rotary import RotaryAngles
from prompt_tuning.models.short_convolution import ShortConvolution
from prompt_tuning.models.streams import StreamView, split_streams
from prompt_tuning.settings.axis_rules import MEMORY_HEADS, MEMORY_KEYS
from prompt_tuning.sharding import collectives

RECURRENT = {
    "short_convolution": ShortConvolution,
    "gated_delta": GatedDelta,
    "mamba2": Mamba2,
    "mamba": Mamba,
    "lightning": Lightning,
}
"""Recurrent mixers, by their names among the parameters of a block."""
OTHER_ATTENTIONS = (FULL_ATTENTION, *SHARING.values())
"""Names of other attention, likewise."""


def local_heads(state: RecurrentState, config: ModelConfig) -> RecurrentState:
    """Cuts the states `[L, ...]` of all heads down to this device's heads."""
    mixer = RECURRENT[config.recurrence]
    if not issubclass(mixer, MemoryMixer):
        return state
    window, memory = jax.tree.map(
        lambda x: collectives.copy_to_shards(x, MEMORY_HEADS), state
    )
    keys = config.recurrent_key_heads * config.recurrent_key_width
    values = config.recurrent_heads * config.recurrent_width
    sizes = [values if name == "value" else keys for name in mixer.order]
    parts = jnp.split(window, np.cumsum(sizes)[:-1], axis=-1)
    axes = [MEMORY_HEADS if name == "value" else MEMORY_KEYS for name in mixer.order]
    shards = [
        collectives.local_memory(part, axis, 2)
        for part, axis in zip(parts, axes, strict=True)
    ]
    memory = collectives.local_memory(memory, MEMORY_HEADS, 1)
    return RecurrentState(jnp.concatenate(shards, axis=-1), memory)


class Block(nnx.Module):
    """Norm, mixers, (norm, cross-attention,) norm, feed-forward; all residual.

    `ModelConfig.norm_placement` moves the norms; with `parallel`, attention and the
    feed-forward layer read the same hidden states. Each part is stacked on the layers
    that have it, and `of_kind` picks the blocks that have the same parts.

    Attributes:
      self_attention_norm: norm before the mixers, or None.
      self_attention: projections of self-attention, or None.
      full_attention: projections of layers without a window, if their heads have other
        sizes, else None; the kinds in `SHARING`, which project to queries alone, have
        an attribute each, too.
      short_convolution: recurrent mixer, or None; each kind in `RECURRENT` has such an
        attribute.
      self_attention_out_norm: norm after the mixers, before or after the sum with the
        residual stream, or None.
      cross_attention_norm: norm before cross-attention, or None.
      cross_attention: projections of cross-attention; None without it.
      cross_attention_out_norm: norm after cross-attention, or None.
      mlp_norm: norm before the feed-forward layer; None if there is no such layer, or
        if it reads the output of `self_attention_norm` (also when it is the only part
        of its layer).
      mlp: the feed-forward layer, dense or with experts.
      dense_mlp: the feed-forward layer of `ModelConfig.dense_layers`, or None.
      mlp_out_norm: norm after the feed-forward layer, or None.
      layer_input: adds this layer's extra input (see `layer_inputs`), or None.
      factor: factor of the layer's output, `[L, 1]`, or None.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        kinds: Sequence[Sequence[str]],
        cross: bool,
    ):
        counts, layers = Counter(part for kind in kinds for part in kind), len(kinds)
        self.dropout_rate = config.dropout_rate
        self.parallel = config.parallel
        self.shares_norm = config.shared_norm or all(len(kind) == 1 for kind in kinds)
        self.multiplier = config.residual_multiplier
        self.skip_multiplier = config.skip_multiplier
        before = config.norm_placement in ("before", "around")
        after = config.norm_placement in ("after", "around", "after_sum")
        self.norms_sum = config.norm_placement == "after_sum"

        def norm(name, present):
            if count := counts[name] or layers * present:
                return Norm(named_key(key, name), config, stacked=count)
            return None

        def part(name, kind, **sizes):
            if count := counts[name]:
                return kind(named_key(key, name), config, layers=count, **sizes)
            return None

        def attention(name, layers):
            if not layers:
                return None
            part_key = named_key(key, name)
            if config.key_value_rank:
                return LatentAttention(part_key, config, layers=layers)
            return Attention(part_key, config, layers=layers, kind=name)

        self.self_attention_norm = norm("self_attention_norm", before)
        self.self_attention: Attention | None = attention(ATTENTION, counts[ATTENTION])
        for name in OTHER_ATTENTIONS:
            setattr(self, name, attention(name, counts[name]))
        for name, kind in RECURRENT.items():
            setattr(self, name, part(name, kind))
        self.self_attention_out_norm = norm("self_attention_out_norm", after)
        self.cross_attention_norm = norm("cross_attention_norm", before and cross)
        self.cross_attention = attention("cross_attention", layers if cross else 0)
        after_cross = after and cross
        self.cross_attention_out_norm = norm("cross_attention_out_norm", after_cross)
        before_mlp = before and not (self.shares_norm or config.separate_norms)
        self.mlp_norm = norm("mlp_norm", before_mlp)
        feed_forward = MixtureOfExperts if config.experts else FeedForward
        self.mlp = part(FEED_FORWARD, feed_forward)
        self.dense_mlp = part(DENSE, FeedForward, width=config.dense_width)
        self.mlp_out_norm = norm("mlp_out_norm", after)
        self.layer_input = (
            LayerInput(named_key(key, "layer_input"), config, layers=layers)
            if config.layer_input_width
            else None
        )
        self.factor = layer_factor(key, config, layers)
        self._set_multipliers(config)

    def _set_multipliers(self, config):
        for path, multiplier in config.projection_multipliers:
            part, name = path.split("/")
            getattr(getattr(self, part), name).multiplier = multiplier

    def __call__(
        self,
        x: Float[Array, "n D"],
        angles: RotaryAngles | None,
        numbers: Int[Array, "n"],
        views: tuple[StreamView, ...],
        past: Mapping[str, Any],
        cross: tuple[KeyValues, ...],
        key: Key[Array, ""] | None,
        skip_norm: Bool[Array, ""] | None = None,
        shared_keys: tuple[KeyValues, ...] | None = None,
        extra: Float[Array, "n d"] | None = None,
    ) -> tuple[Float[Array, "n D"], dict[str, tuple[KeyValues | RecurrentState, ...]]]:
        """Runs one block.

        Args:
          x: hidden states at all positions of all streams.
          angles: rotary angles of this block, or None.
          numbers: index of each position in the whole batch.
          views: the streams.
          past: what precedes the streams, by the names in `kept_by`: keys and values,
            or for a recurrent mixer the state that the first stream continues, or None.
          cross: keys and values of an encoder's outputs.
          key: random key for dropout.
          skip_norm: True to skip the norm before the mixers; None for never.
          shared_keys: keys and values of each stream, if another layer computed them.
          extra: extra input of this layer, or None.

        Returns:
          the hidden states, and under the names of `past` what each stream leaves for
            later positions: its keys and values, or its last state.
        """
        with branch_draws(optional_key(key, "branches"), numbers):
            rest = past, cross, key, skip_norm, shared_keys, extra
            return self._run(x, angles, numbers, views, *rest)

    def _run(
        self, x, angles, numbers, views, past, cross, key, skip_norm, shared_keys, extra
    ):
        start, zeros = x, jnp.zeros_like(x)  # zeros: what an absent part adds
        normed = normalize(self.self_attention_norm, x)
        if skip_norm is not None:
            normed = jnp.where(skip_norm, x, normed)
        index = DropoutIndex.at_positions(numbers, x.shape[-1])  # [n, D]

        def add(x, update, norm, name):
            if not self.norms_sum:
                update = normalize(norm, update)
            key_of_name = optional_key(key, name)
            update = dropout(update, self.dropout_rate, key_of_name, index)
            x = x if self.skip_multiplier == 1 else x * self.skip_multiplier
            x = x + (update if self.multiplier == 1 else update * self.multiplier)
            return normalize(norm, x) if self.norms_sum else x

        update, kept = self._mix(normed, angles, views, past, key, shared_keys)
        record(zeros if update is None else update, "self_attention")
        if update is not None:
            x = add(x, update, self.self_attention_out_norm, "self_out")  # [n, D]
        if cross:
            update = self._attend_to_encoder(x, views, cross, key)
            record(update, "cross_attention")
            x = add(x, update, self.cross_attention_out_norm, "cross_out")
        if not self.shares_norm:
            normed = normalize(self.mlp_norm, start if self.parallel else x)
        feed_forward, update = self.mlp or self.dense_mlp, None
        if feed_forward is not None:
            update = feed_forward(normed, optional_key(key, "mlp"), numbers)
        record(zeros if update is None else update, "mlp")
        if update is not None:
            x = add(x, update, self.mlp_out_norm, "mlp_out")
        if self.layer_input is not None:
            x = x + self.layer_input(x, extra)
        if self.factor is not None:
            x = x * self.factor[...].astype(x.dtype)
        record(x, "hidden")
        return x, kept

    def cross_keys_values(
        self,
        computed: Sequence[KeyValues | None],
        encoded: Sequence[Float[Array, "_ _ D"] | None],
        key: Key[Array, ""] | None,
    ) -> tuple[KeyValues, ...]:
        """Returns keys and values of encoder outputs, computing those that are missing.

        Where `computed` is None, `encoded` has the output, the text's last.
        """
        key_values = []
        for i, (key_value, output) in enumerate(zip(computed, encoded, strict=True), 1):
            if key_value is None:
                assert self.cross_attention is not None and output is not None
                shared = i < len(encoded)
                key_value = self.cross_attention.encoded_source(output, key, shared)
            key_values.append(key_value)
        return tuple(key_values)

    def of_kind(self, kind: Sequence[str], kinds: Sequence[Sequence[str]]) -> "Block":
        """Returns the blocks that have exactly the parts `kind`, without parameters.

        `kinds` has the parts of every block; see `layer_kinds`.
        """
        block = merge(*split(self))
        for missing in {part for parts in kinds for part in parts} - {*kind}:
            setattr(block, missing, None)
        return cast(Block, block)

    def _mix(self, normed, angles, views, past, key, shared_keys):
        """Runs the mixers, if the block has any.

        Returns:
          the update or None, and what each stream leaves for later positions.
        """
        updates, kept = [], {}
        for name in RECURRENT:
            mixer = getattr(self, name)
            if mixer is not None:
                update, kept[name] = mixer(normed, views, past[name])
                updates.append(update)
        for name in (ATTENTION, *OTHER_ATTENTIONS):
            mixer = getattr(self, name)
            if mixer is not None:
                update, key_values = self._attend_to_self(
                    mixer, normed, angles, views, past[KEYS], key, shared_keys
                )
                updates.append(update)
                kept |= {KEYS: key_values} if shared_keys is None else {}
        return functools.reduce(operator.add, updates) if updates else None, kept

    def _attend_to_self(self, attention, normed, angles, views, past, key, key_values):
        if key_values is None:
            query, keys, values, gate = attention.project(normed, angles)
            # Of each stream, [R, Q, G, K].
            keys, values = (
                split_streams(named(part, name), views)
                for part, name in ((keys, "keys"), (values, "values"))
            )
            key_values = tuple(map(KeyValues.from_heads, keys, values))
            key_values = attention.in_form_of(past, key_values)
        else:
            query, keys, gate = attention.project_queries(normed, angles), [], None
        query = named(query, "query")  # [n, H, K]
        # Each stream attends to what ran before, to earlier streams and to itself.
        sources = [
            [
                source_view.attention_source(source)
                for source_view, source in zip(
                    view.self_views, (*past, *key_values[: i + 1]), strict=True
                )
            ]
            for i, view in enumerate(views)
        ]
        first_rows, queries = [x.first_row for x in views], split_streams(query, views)
        for i, view in enumerate(views):
            if view.relative is not None:
                arguments = queries[i], keys[i], view.relative, key
                bias = attention.relative_scores(*arguments)
                sources[i][-1] = sources[i][-1]._replace(bias=bias)
        if is_requested(ATTENTION_WEIGHTS):
            weights = attention.weights(queries[-1], sources[-1])
            weights = weights.reshape(-1, weights.shape[-1])
            earlier = len(query) - len(weights)  # positions of other streams
            record(jnp.pad(weights, ((earlier, 0), (0, 0))), ATTENTION_WEIGHTS)
        update = attention.attend_and_project(
            queries,
            sources,
            first_rows,
            optional_key(key, "self"),
            gate,
        )
        return update, key_values

    def _attend_to_encoder(self, x, views, cross, key):
        assert self.cross_attention is not None  # only an encoder-decoder gets here
        normed = normalize(self.cross_attention_norm, x)
        normed = collectives.copy_to_shards(normed, "heads")
        query = self.cross_attention.queries(normed)  # [n, H, K]
        sources = [
            [
                source_view.attention_source(source)
                for source_view, source in zip(view.cross_views, cross, strict=True)
            ]
            for view in views
        ]
        first_rows = [view.first_row for view in views]
        return self.cross_attention.attend_and_project(
            split_streams(query, views), sources, first_rows, optional_key(key, "cross")
        )
