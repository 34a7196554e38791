"""One block: attention over sources, then a feed-forward layer, both residual.

What every position goes through alone (norms, projections, the feed-forward layer) runs
on all streams as one `[positions, D]`, so that each weight is read once. A block knows
nothing of prompts or of decoding: a stream sees what its view says.
"""

from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key, optional_key
from prompt_tuning.core.rematerialization import ATTENTION, named
from prompt_tuning.models.attention import AttentionSource, KeyValues, attend, rotate
from prompt_tuning.models.layers import Dense, FeedForward, Norm
from prompt_tuning.models.streams import StreamView, flatten_streams, split_streams
from prompt_tuning.sharding import collectives


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
        return KeyValues(*map(collectives.local_groups, made))

    def attend_and_project(
        self,
        queries: Sequence[Float[Array, "_ _ H K"]],
        sources: Sequence[Sequence[AttentionSource]],
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
        flat = named(flatten_streams(mixed), ATTENTION)
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
        views: tuple[StreamView, ...],
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
        mixed, fresh = self._attend_to_self(x, angles, views, past, key)
        places = DropoutIndex.at_positions(numbers, x.shape[-1])

        def drop(x, name):
            return dropout(x, self.dropout_rate, optional_key(key, name), places)

        x = x + drop(mixed, "self_out")
        if cross:
            mixed = self._attend_to_encoder(x, views, cross, key)
            x = x + drop(mixed, "cross_out")
        mixed = self.mlp(self.mlp_norm(x), optional_key(key, "mlp"), numbers)
        return x + drop(mixed, "mlp_out"), fresh

    def cross_keys_values(
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

    def _attend_to_self(self, x, angles, views, past, key):
        normed = collectives.copy_to_shards(self.self_attention_norm(x), "heads")
        query, made = (
            self.self_attention.queries(normed),
            self.self_attention.keys_values(normed),
        )
        if angles is not None:
            query = rotate(query, angles)
            made = KeyValues(rotate(made.keys, angles), made.values)
        query = named(query, "query")
        keys, values = (
            split_streams(named(part, name), views)
            for part, name in zip(made, ("keys", "values"), strict=True)
        )
        fresh = tuple(map(KeyValues, keys, values))
        sources = [
            [
                seen.attention_source(made)
                for seen, made in zip(
                    view.self_views, (*past, *fresh[: i + 1]), strict=True
                )
            ]
            for i, view in enumerate(views)
        ]
        first_rows = [view.first_row for view in views]
        mixed = self.self_attention.attend_and_project(
            split_streams(query, views), sources, first_rows, optional_key(key, "self")
        )
        return mixed, fresh

    def _attend_to_encoder(self, x, views, cross, key):
        assert self.cross_attention is not None  # a decoder of an encoder-decoder
        assert self.cross_attention_norm is not None
        normed = collectives.copy_to_shards(self.cross_attention_norm(x), "heads")
        query = self.cross_attention.queries(normed)
        sources = [
            [view.cross_views[j].attention_source(made) for j, made in enumerate(cross)]
            for view in views
        ]
        first_rows = [view.first_row for view in views]
        return self.cross_attention.attend_and_project(
            split_streams(query, views), sources, first_rows, optional_key(key, "cross")
        )
