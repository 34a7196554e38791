"""The attention layer of a block: projections, and attention of streams to sources."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.adapted_rows import branch_draws
from prompt_tuning.core.dropout import DropoutIndex
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import ATTENTION as SELF_ATTENTION
from prompt_tuning.core.layer_kinds import FULL_ATTENTION, SHARING, attention_sizes
from prompt_tuning.core.masks import CausalMask
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, named_key, optional_key
from prompt_tuning.core.recomputation import ATTENTION, named
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.models import attention
from prompt_tuning.models.attention import AttentionSource, KeyValues, ScoreSettings
from prompt_tuning.models.attention_choice import choose_attention
from prompt_tuning.models.disentangled import RelativePositions, distance_products
from prompt_tuning.models.flash_attention import attend_fused
from prompt_tuning.models.layers import dense_layers
from prompt_tuning.models.norms import Norm, normalize, root_mean_square_norm
from prompt_tuning.models.rotary import RotaryAngles, rotate_queries_and_keys
from prompt_tuning.models.streams import flatten_streams
from prompt_tuning.sharding import collectives

OF_HEADS = ("head", "each_head", "head_after")
"""Values of `ModelConfig.query_key_norm` for norms of heads, one by one."""


class Projected(NamedTuple):
    """Projections of hidden states for self-attention, with positions applied.

    Attributes:
      query: queries.
      keys: keys; see `KeyValues` for compressed ones.
      values: values.
      gate: factors of the attended values, or None.
    """

    query: Float[Array, "n H K"]
    keys: Float[Array, "n G K"]
    values: Float[Array, "n G V"]
    gate: Float[Array, "n HK"] | None


class Attention(nnx.Module):
    """Query, key, value and output projections of every block.

    Attributes:
      query: `[L, D, H * K]`.
      key: `[L, D, G * K]`; None in a layer that reuses another layer's keys and values.
      value: `[L, D, G * K]`; None in such a layer, or if the projected keys are also
        the values.
      query_gate: gates of the output, `[L, D, H * K]`, or None.
      out: `[L, H * K, D]`.
      query_norm: norm of queries before the rotary embedding: `[L, K]`, the same for
        every head, or `[L, H * K]`; None without it.
      key_norm: the same for keys.
      sinks: score of a key without a value that takes a share of each head's softmax,
        `[L, H]`, or None (see `ModelConfig.attention_sinks`).
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        layers: int,
        kind: str = SELF_ATTENTION,
    ):
        self.config, self.interleaved = config, config.rotary_interleaved
        self.head_width, groups = attention_sizes(config, kind)
        self.dropout_rate, self.scale = config.dropout_rate, config.score_scale
        self.value_width = min(config.width_of_values, self.head_width)
        # Of keys and values as they are kept, there are more heads and wider ones.
        self.repeats = config.key_value_heads // groups
        self.padding = config.head_width - self.head_width
        inner, shared = config.heads * self.head_width, groups * self.head_width
        dense = dense_layers(key, config, layers)
        # T5 does not scale scores at run time; its query kernel starts smaller instead.
        start = 1.0 if config.scale_scores else config.head_width**-0.5
        outward = ((config.width, inner), ("embed", "heads"))
        self.query = dense("query", *outward, start)
        inward = ((config.width, shared), ("embed", "key_value_heads"))
        reads_keys = config.keys_as_values and kind == FULL_ATTENTION
        shares = kind in SHARING.values()
        self.key = None if shares else dense("key", *inward)
        self.value = None if shares or reads_keys else dense("value", *inward)
        gated = config.gated_attention
        self.query_gate = dense("query_gate", *outward) if gated else None
        self.out = dense("out", (inner, config.width), ("heads", "embed"))

        def norm(name, width, axis):
            if config.query_key_norm in ("none", "rotated"):
                return None
            if alike := config.query_key_norm in ("head", "head_after"):
                # Each device normalizes its own heads with the same scale.
                width = self.head_width
            return Norm(
                named_key(key, name),
                config,
                stacked=layers,
                width=width,
                axis="head_width" if alike else axis,
                head_width=self.head_width if self.norms_heads else None,
                partial_over=axis if alike else None,
            )

        norms = config.query_key_norm
        self.norms_last, self.norms_heads = norms == "head_after", norms in OF_HEADS
        self.query_norm = norm("query_norm", inner, "heads")
        self.key_norm = None if shares else norm("key_norm", shared, "key_value_heads")
        self.sinks = _sinks(named_key(key, "sinks"), config, layers)

    def project(self, x: Float[Array, "n D"], angles: RotaryAngles | None) -> Projected:
        """Projects normalized hidden states to positioned queries, keys and values."""
        x = collectives.copy_to_shards(x, "heads")
        query, (keys, values) = self.queries(x), self.keys_and_values(x)
        if angles is not None:
            if self.padding:
                angles = angles.within(self.head_width)
            if self.config.query_key_norm == "rotated":
                query, keys = (self._rotated_norm(x, angles) for x in (query, keys))
            query, keys = rotate_queries_and_keys(
                query, keys, angles, interleaved=self.interleaved
            )
        if self.norms_last:
            query = normalize(self.query_norm, query)
            keys = normalize(self.key_norm, keys)
        query, keys, values = map(self._pad_heads, (query, keys, values))
        if self.repeats > 1:
            keys, values = (jnp.repeat(x, self.repeats, 1) for x in (keys, values))
        return Projected(query, keys, values, self.gate(x))

    def project_queries(
        self, x: Float[Array, "n D"], angles: RotaryAngles | None
    ) -> Float[Array, "n H K"]:
        """Projects to queries alone, with their positions; see `project`."""
        query = self.queries(collectives.copy_to_shards(x, "heads"))
        if angles is not None:
            angles = angles.within(self.head_width)
            query, _ = rotate_queries_and_keys(
                query, query, angles, interleaved=self.interleaved
            )
        return self._pad_heads(query)

    def _pad_heads(self, heads: Float[Array, "n _ k"]) -> Float[Array, "n _ K"]:
        """Pads heads with zeros, which changes neither scores nor sums."""
        if not self.padding:
            return heads
        return jnp.pad(heads, ((0, 0), (0, 0), (0, self.padding)))

    def queries(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead H K"]:
        """Projects to unrotated queries, for this device's heads."""
        norm = None if self.norms_last else self.query_norm
        return self._heads(self.query(x), norm)

    def gate(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead HK"] | None:
        """Computes the factors of the attended values; None in models without gates."""
        if self.query_gate is None:
            return None
        return jax.nn.sigmoid(self.query_gate(x))

    def keys_and_values(
        self, x: Float[Array, "*lead D"]
    ) -> tuple[Float[Array, "*lead G K"], Float[Array, "*lead G K"]]:
        """Projects to keys and values, for this device's heads."""
        norm = None if self.norms_last else self.key_norm
        assert self.key is not None  # else `project_queries` is called
        projected = self.key(x)
        keys = self._heads(projected, norm)
        values = self._heads(projected if self.value is None else self.value(x))
        if self.config.value_norm:
            ones = jnp.ones(self.head_width, values.dtype)
            values = root_mean_square_norm(values, ones, self.config.norm_epsilon)
        return collectives.local_groups(keys), collectives.local_groups(values)

    def in_form_of(
        self, past: Sequence[KeyValues | None], own: tuple[KeyValues, ...]
    ) -> tuple[KeyValues, ...]:
        """Returns projected keys and values in the form that they are kept in.

        Args:
          past: what precedes them in this block.
          own: keys and values of each stream.
        """
        del past
        return own

    def source(self, x: Float[Array, "R S D"]) -> KeyValues:
        """Projects rows to the keys and values that attention reads."""
        return KeyValues.from_heads(*self.keys_and_values(x))

    def relative_scores(
        self,
        query: Float[Array, "R Q H K"],
        keys: Float[Array, "R Q H K"],
        relative: RelativePositions,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "R H Q Q"]:
        """Computes the part of self-attention's scores that relative positions add.

        `query` and `keys` belong to the same rows, and `relative` to distances in them.
        """
        vectors = collectives.copy_to_shards(relative.vectors, "heads")
        with branch_draws(optional_key(key, "relative"), jnp.arange(len(vectors))):
            projected = self.queries(vectors), self.keys_and_values(vectors)[0]
        products = distance_products(query, keys, projected, relative.rows)
        return products.astype(jnp.float32) * self.scale

    def encoded_source(
        self, encoded: Float[Array, "R S D"], key: Key[Array, ""] | None, shared: bool
    ) -> KeyValues:
        """Projects an encoder's output to keys and values.

        `shared` tells the output of shared prompts from that of the batch's rows.
        """
        name = "encoded_prompts" if shared else "encoded"
        rows = len(encoded)
        first = 0 if shared else collectives.row_range(rows).first
        numbers = DropoutIndex.for_rows(encoded.shape, first).high[..., 0]  # [R, S]
        with branch_draws(optional_key(key, name), numbers):
            return self.source(encoded)

    def _heads(
        self, x: Float[Array, "*lead HK"], norm: Norm | None = None
    ) -> Float[Array, "*lead H K"]:
        """Splits projected positions into heads, normalized if configured."""
        if norm is not None and not self.norms_heads:
            x = norm(x)
        heads = x.reshape(*x.shape[:-1], -1, self.head_width)
        return norm(heads) if norm is not None and self.norms_heads else heads

    def _rotated_norm(
        self, heads: Float[Array, "n _ K"], angles: RotaryAngles
    ) -> Float[Array, "n _ K"]:
        """Normalizes heads before rotation, which leaves mean squares unchanged."""
        ones = jnp.ones(heads.shape[-1], heads.dtype)
        normed = root_mean_square_norm(heads, ones, self.config.norm_epsilon)
        if angles.rotated is None:
            return normed
        return jnp.where(angles.rotated, normed, heads)

    def attend_and_project(
        self,
        queries: Sequence[Float[Array, "_ _ H K"]],
        sources: Sequence[Sequence[AttentionSource]],
        first_rows: Sequence[Int[Array, ""] | int],
        key: Key[Array, ""] | None,
        gate: Float[Array, "n HK"] | None = None,
    ) -> Float[Array, "n D"]:
        """Attends from each stream to its sources and projects back to the model width.

        Args:
          queries: queries of each stream.
          sources: the sources of each stream.
          first_rows: index in the whole batch of each stream's first row.
          key: random key for dropout.
          gate: factors of the attended values, or None.

        Returns:
          the output at all positions of all streams, concatenated.
        """
        # Of each stream, [G, R, h, Q, K].
        attended = [
            self._attend(query, stream_sources, optional_key(key, f"stream_{i}"), first)
            for i, (query, stream_sources, first) in enumerate(
                zip(queries, sources, first_rows, strict=True)
            )
        ]
        by_row = list(map(attention.positions_first, attended))
        flat = flatten_streams(by_row)  # [n, H, K]
        flat = flat[..., : self.value_width].reshape(len(flat), -1)  # [n, H * K]
        return self.out(flat if gate is None else flat * gate)

    def weights(
        self, query: Float[Array, "R Q H K"], sources: Sequence[AttentionSource]
    ) -> Float[Array, "R Q _"]:
        """Computes a stream's attention weights, averaged over heads.

        Raises:
          InputError: if a fused kernel runs, which keeps no weights.
        """
        if isinstance(sources[-1].mask, CausalMask):
            raise InputError(
                "a fused kernel computes attention, and keeps no attention weights: "
                f"give {how_to_set('Pretrained.attention', 'reference')}"
            )
        count = sum(source.key_values.keys.shape[-2] for source in sources)
        query = attention.groups_first(query, sources[0].key_values.groups)
        if self.sinks is not None:
            sources = [*sources, _sink(self.sinks[...], query)]
        settings = ScoreSettings(self.scale, self.config.attention_soft_cap)
        return attention.attention_weights(query, sources, settings)[..., :count]

    def _attend(self, query, sources, key, first_row):
        """Attends with the kernel or the reference, as the stream's views require."""
        query = attention.groups_first(query, sources[0].key_values.groups)
        if isinstance(sources[-1].mask, CausalMask):
            kernel = choose_attention(self.config).kernel
            assert kernel is not None  # else the mask would be an array
            return attend_fused(kernel, query, sources, scale=self.scale)
        if self.sinks is not None:
            sources = [*sources, _sink(self.sinks[...], query)]
        output = attention.attend(
            query,
            sources,
            scale=self.scale,
            soft_cap=self.config.attention_soft_cap,
            dropout_rate=self.dropout_rate,
            key=key,
            first_row=first_row,
        )
        return named(output, ATTENTION)  # a kernel names its output itself


def _sinks(key: Key[Array, ""], config: ModelConfig, layers: int) -> nnx.Param | None:
    """Declares the sink scores of all heads; None if the config has no sinks."""
    if not config.attention_sinks:
        return None
    shape, axes = (layers, config.heads), ("layers", "heads")
    zeros = jax.nn.initializers.zeros
    return declare(key, shape, axes, zeros, config.parameter_dtype)


def _sink(
    scores: Float[Array, "H"], query: Float[Array, "G R h Q K"]
) -> AttentionSource:
    """Returns a source of one key with the given scores and a zero value."""
    groups, length, width = query.shape[0], query.shape[3], query.shape[4]
    zeros = jnp.zeros((groups, 1, 1, width), query.dtype)
    bias = jnp.broadcast_to(scores[None, :, None, None], (1, len(scores), length, 1))
    return AttentionSource(KeyValues(zeros, zeros), None, bias)
