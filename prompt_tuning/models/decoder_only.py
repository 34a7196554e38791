"""The decoder-only model: Llama, Qwen2 and GPT-2, by the choices in its config."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.dropout import dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key, optional_key
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Embedding
from prompt_tuning.models.row_info import RowInfo, positions_in_segment, select_prompts
from prompt_tuning.models.streams import Stream
from prompt_tuning.models.transformer import Stack


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

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """What runs ahead of all rows, once for all of them; here nothing.

        Args:
          key: for dropout; None for none.
        """
        del key
        return None

    def visible_to(self, stream: Stream, rows: RowInfo) -> Stream:
        """What `prefix_stream` gave, as rows of text see it."""
        del rows
        return stream

    def last_hidden(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """The last hidden state of what `prefix_stream` gave."""
        return hidden[:, -1]

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """What runs for each row: here the text alone, causally."""
        del key
        stream = causal_stream(text, rows.segment_ids)
        return dataclasses.replace(
            stream, context_mask=masks.encoder_mask(rows.lengths, text.shape[1])
        )

    def stream_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Where tokens stand in the stream of the text; here where they stand in it.

        Args:
          positions: numbers of tokens of each row; `T` is what would follow the last.
          rows: of text.
          text_length: `T`.
        """
        del rows, text_length
        return positions


def causal_stream(
    hidden: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None
) -> Stream:
    """Rows that run causally; packed ones example by example."""
    if segments is None:
        length = hidden.shape[1]
        mask = masks.decoder_causal_mask(length)
        return Stream(hidden, jnp.arange(length)[None], mask)
    mask = masks.decoder_packed_mask(segments)
    return Stream(hidden, positions_in_segment(segments), mask, segments=segments)


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

    def select_predicting(
        self,
        text: Float[Array, "B S D"],
        positions: Int[Array, "B m"],
        rows: RowInfo,
        last: Float[Array, "N D"] | None,
        text_length: int,
    ) -> Float[Array, "B m D"]:
        """Picks the hidden state that predicts the token at each position of the row.

        A token is predicted by what stands before it, a token or a prompt's vector; the
        first token of an example by `last` of a prefix that ran ahead, or by nothing:
        its weight must be zero then.
        """
        places = self.decoder.stream_positions(positions, rows, text_length)
        before = jnp.maximum(places - 1, 0)
        picked = jnp.take_along_axis(text, before[..., None], axis=1, mode="clip")
        if last is None:
            return picked
        place, own = positions, last_vectors(last, positions, rows)
        if rows.segment_ids is not None:
            in_example = positions_in_segment(rows.segment_ids)
            place = jnp.take_along_axis(in_example, positions, axis=1)
        return jnp.where(place[..., None] == 0, own, picked)

    def prefix(self, key: Key[Array, ""] | None = None) -> DecoderPrefix | None:
        """The prompt, run ahead of all rows where the decoder says that it can be."""
        stream = self._prefix_stream(key)
        if stream is None:
            return None
        (hidden,), (made,) = self.decoder.run(
            [stream], key=optional_key(key, "prefix"), keep=True
        )
        return DecoderPrefix(made, self.decoder.last_hidden(hidden))

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: DecoderPrefix | None = None,
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        rows = RowInfo.from_inputs(batch, self.config.vocabulary_size)
        streams, past = [self._text_stream(batch.tokens, rows, key)], []
        ahead = self._prefix_stream(key)
        if ahead is not None and prefix is None:
            streams.insert(0, self.decoder.visible_to(ahead, rows))
        elif ahead is not None and prefix is not None:
            past.append(
                self.decoder.visible_to(ahead, rows).as_context(prefix.key_values)
            )
        (*before, text), _ = self.decoder.run(
            streams,
            past=(*self.decoder.prefix_contexts(rows), *past),
            key=optional_key(key, "decoder"),
        )
        last = None if prefix is None else prefix.last
        if before:
            last = self.decoder.last_hidden(before[0])
        length = batch.tokens.shape[1]
        picked = self.select_predicting(text, batch.loss_positions, rows, last, length)
        return self.decoder.final_norm(picked)

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads the rows given and makes room for `capacity` tokens more.

        Args:
          tokens: rows, padded on the right.
          lengths: real tokens of each row, at least 1 without a prompt.
          capacity: tokens that may follow.
          prompt_ids: which prompt each row has; see `Batch`.

        Returns:
          the hidden state that predicts each row's next token, and the cache.
        """
        soft = tokens - self.config.vocabulary_size
        rows = RowInfo(lengths, lengths, None, prompt_ids, soft)
        past, prefix, ahead = self.decoder.prefix_contexts(rows), self.prefix(), None
        if prefix is not None:
            ahead = self._prefix_stream(None)
            assert ahead is not None
            context = self.decoder.visible_to(ahead, rows).as_context(prefix.key_values)
            past = (*past, context)
        stream = self._text_stream(tokens, rows, None)
        (hidden,), (made,) = self.decoder.run([stream], past=past, keep=True)
        last = None if prefix is None else prefix.last
        picked = self.select_predicting(
            hidden, lengths[:, None], rows, last, tokens.shape[1]
        )
        cache = Cache.create(
            self.config,
            lengths + self.decoder.prompt_count(),
            past=(*past, stream.as_context(made)),
            capacity=capacity,
        )
        return self.decoder.final_norm(picked)[:, 0], cache

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self.token_embedder(tokens[:, None], self.config.dtype)
        stream = self._add_positions(cache.stream(embedded), None)
        (hidden,), (made,) = self.decoder.run(
            [stream], past=cache.contexts(), keep=True
        )
        return self.decoder.final_norm(hidden)[:, 0], cache.append(made)

    def _prefix_stream(self, key) -> Stream | None:
        stream = self.decoder.prefix_stream(key)
        if stream is None:
            return None
        return self._add_positions(stream, optional_key(key, "prefix_input"))

    def _text_stream(self, tokens, rows: RowInfo, key) -> Stream:
        text = self.token_embedder(tokens, self.config.dtype)
        stream = self.decoder.text_stream(text, rows, key)
        return self._add_positions(stream, optional_key(key, "input"))

    def _add_positions(self, stream: Stream, key) -> Stream:
        """Adds learned positions, to prompt vectors too, then drops out."""
        hidden = stream.hidden.astype(self.config.dtype)
        if self.position_embedder is not None:
            hidden = hidden + self.position_embedder(
                stream.positions, self.config.dtype
            )
        hidden = dropout(hidden, self.config.dropout_rate, key, stream.dropout_index)
        return dataclasses.replace(stream, hidden=hidden)


def last_vectors(
    last: Float[Array, "N D"], positions: Int[Array, "B m"], rows: RowInfo
) -> Float[Array, "#B #m D"]:
    """The last vector of the prompt that each of some tokens stands behind."""
    ids, count = rows.prompt_ids, len(positions)
    if len(last) == 1:
        return last[:, None]
    if ids is not None and ids.ndim == 2:
        assert rows.segment_ids is not None  # prompts by example are of packed rows
        segment = jnp.take_along_axis(rows.segment_ids, positions, axis=1)
        own = jnp.take_along_axis(ids, jnp.maximum(segment - 1, 0), axis=1)
        return last[own]
    return select_prompts(last, count, ids)[:, None]
