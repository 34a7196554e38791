"""The decoder-only model: Llama, Qwen2 and GPT-2, by the choices in its config."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.data.batches import Batch
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Embedding, dropout
from prompt_tuning.models.parameters import named_key, optional_key
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.models.transformer import Stack


class Rows(NamedTuple):
    """What is known of the rows of a batch; see `Batch`."""

    lengths: Int[Array, "B"]
    prefix_lengths: Int[Array, "B"]
    segment_ids: Int[Array, "B T"] | None = None
    prompt_ids: Int[Array, "B"] | None = None

    @classmethod
    def of(cls, batch: Batch) -> "Rows":
        """Of a batch."""
        return cls(
            batch.lengths, batch.prefix_lengths, batch.segment_ids, batch.prompt_ids
        )


class DecoderPrefix(NamedTuple):
    """A prompt that was run ahead of the text.

    Attributes:
      key_values: `[L, N, P, G, K]`.
      last: hidden state of the last vector, `[N, D]`, which predicts a first token.
    """

    key_values: KeyValues
    last: Float[Array, "N D"]


class Decoder(Stack):
    """A causal stack."""

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, cross: bool):
        super().__init__(
            key, config, layers=config.layers, cross=cross, bidirectional=False
        )

    def prompt_count(self) -> masks.Count:
        """Vectors that stand among each row's text."""
        return 0

    def prefix_stream(self) -> Stream | None:
        """What runs ahead of all rows, once for all of them; here nothing."""
        return None

    def last(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """The last hidden state of what `prefix_stream` gave."""
        return hidden[:, -1]

    def text_stream(self, text: Float[Array, "B T D"], rows: Rows) -> Stream:
        """What runs for each row: here the text alone, causally."""
        stream = causal_stream(text, rows.segment_ids)
        return dataclasses.replace(
            stream, later_mask=masks.encoder_mask(rows.lengths, text.shape[1])
        )


def causal_stream(
    hidden: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None = None,
    first: masks.Count = 0,
) -> Stream:
    """Rows that run causally, the first token of each example at position `first`."""
    if segment_ids is None:
        length = hidden.shape[1]
        places, mask = jnp.arange(length)[None], masks.decoder_causal_mask(length)
    else:
        places = places_in_segment(segment_ids)
        mask = masks.decoder_packed_mask(segment_ids)
    return Stream(hidden, first + places, mask)


def places_in_segment(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many tokens of its own example stand before each token of a packed row."""
    place = jnp.arange(segment_ids.shape[1])
    starts = jnp.diff(segment_ids, axis=1, prepend=-1) != 0
    return place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)


class DecoderOnly(LanguageModel):
    """Embedding, causal blocks, head.

    Attributes:
      position_embedder: `[positions, D]` where the config says learned, else None.
      decoder: the blocks.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        decoder: Callable[..., Decoder] = Decoder,
    ):
        super().__init__(key, config)
        self.position_embedder = (
            Embedding(
                named_key(key, "position_embedder"),
                config,
                config.maximum_positions or 0,
                "positions",
            )
            if config.positions == "learned"
            else None
        )
        self.decoder = decoder(named_key(key, "decoder"), config, cross=False)

    def predicting(
        self,
        text: Float[Array, "B S D"],
        positions: Int[Array, "B m"],
        rows: Rows,
        last: Float[Array, "N D"] | None,
    ) -> Float[Array, "B m D"]:
        """Picks the hidden state that predicts the token at each position of the row.

        Token `i` is predicted where token `i - 1` is read; the first token of an
        example by `last` of a prefix, or by nothing: its weight must be zero then.
        """
        del rows, last
        before = jnp.maximum(positions - 1, 0)
        return jnp.take_along_axis(text, before[..., None], axis=1, mode="clip")

    def prefix(self, key: Key[Array, ""] | None = None) -> DecoderPrefix | None:
        """The prompt, run ahead of all rows where the decoder says that it can be."""
        stream = self._prefix_stream(key)
        if stream is None:
            return None
        (hidden,), (made,) = self.decoder.run(
            [stream], key=optional_key(key, "prefix"), keep=True
        )
        return DecoderPrefix(made, self.decoder.last(hidden))

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: DecoderPrefix | None = None,
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        rows = Rows.of(batch)
        streams, past = [self._text_stream(batch.tokens, rows, key)], []
        if prefix is not None:
            past.append(self._context(prefix, batch.prompt_ids))
        elif (ahead := self._prefix_stream(key)) is not None:
            streams.insert(0, dataclasses.replace(ahead, later_rows=batch.prompt_ids))
        (*before, text), _ = self.decoder.run(
            streams, past=past, key=optional_key(key, "decoder")
        )
        last = None if prefix is None else prefix.last
        if before:
            last = self.decoder.last(before[0])
        picked = self.predicting(text, batch.loss_positions, rows, last)
        return self.decoder.final_norm(picked)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], room: int
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads the rows given and makes room for `room` tokens more.

        Args:
          tokens: rows, padded on the right.
          lengths: real tokens of each row, at least 1 without a prompt.
          room: tokens that may follow.

        Returns:
          the hidden state that predicts each row's next token, and the cache.
        """
        rows, prefix = Rows(lengths, lengths), self.prefix()
        stream = self._text_stream(tokens, rows, None)
        past = () if prefix is None else (self._context(prefix, None),)
        (hidden,), (made,) = self.decoder.run([stream], past=past, keep=True)
        last = None if prefix is None else prefix.last
        picked = self.predicting(hidden, lengths[:, None], rows, last)
        cache = Cache.create(
            self.config,
            lengths + self.decoder.prompt_count(),
            past=(*past, stream.context(made)),
            room=room,
        )
        return self.decoder.final_norm(picked)[:, 0], cache

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self.token_embedder(tokens[:, None], self.config.dtype)
        stream = self._enter(cache.stream(embedded), None)
        (hidden,), (made,) = self.decoder.run(
            [stream], past=cache.contexts(), keep=True
        )
        return self.decoder.final_norm(hidden)[:, 0], cache.extended(made)

    def _prefix_stream(self, key) -> Stream | None:
        stream = self.decoder.prefix_stream()
        if stream is None:
            return None
        return self._enter(stream, optional_key(key, "prefix_input"))

    def _context(self, prefix: DecoderPrefix, prompt_ids) -> Context:
        """What rows see of a prefix that was run before."""
        stream = self.decoder.prefix_stream()
        assert stream is not None
        context = stream.context(prefix.key_values)
        return context._replace(rows=prompt_ids)

    def _text_stream(self, tokens, rows: Rows, key) -> Stream:
        text = self.token_embedder(tokens, self.config.dtype)
        return self._enter(
            self.decoder.text_stream(text, rows), optional_key(key, "input")
        )

    def _enter(self, stream: Stream, key) -> Stream:
        """Adds learned positions, to prompt vectors too, then drops out."""
        hidden = stream.hidden.astype(self.config.dtype)
        if self.position_embedder is not None:
            hidden = hidden + self.position_embedder(
                stream.positions, self.config.dtype
            )
        hidden = dropout(hidden, self.config.dropout_rate, key)
        return dataclasses.replace(stream, hidden=hidden)
