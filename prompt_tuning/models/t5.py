"""The encoder-decoder model: T5 1.0 and 1.1, by the choices in its config."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key, optional_key
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.models.transformer import Stack
from prompt_tuning.sharding import collectives


class Encoder(Stack):
    """A stack in which all real tokens of a row see each other."""

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        super().__init__(
            key, config, layers=config.encoder_layers, cross=False, bidirectional=True
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

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """What runs for each row: here the text alone."""
        del key
        stream = encoder_stream(text, rows.lengths)
        if rows.segment_ids is None:
            return stream
        mask = masks.segment_mask(rows.segment_ids, rows.segment_ids)
        return dataclasses.replace(stream, mask=mask, segments=rows.segment_ids)


def encoder_stream(hidden: Float[Array, "R S D"], lengths: Int[Array, "_"]) -> Stream:
    """Rows of which the first `lengths[b]` positions see each other."""
    length = hidden.shape[1]
    mask = masks.encoder_mask(lengths, length)
    return Stream(hidden, jnp.arange(length)[None], mask, context_mask=mask)


class EncoderPrefix(NamedTuple):
    """A prompt that was run through the encoder ahead of the text.

    Attributes:
      key_values: of the encoder's blocks, `[L, N, P, G, K]`.
      cross: what the decoder's blocks make of the encoder's output, of that shape too.
    """

    key_values: KeyValues
    cross: KeyValues


class EncoderDecoder(LanguageModel):
    """One embedding table, an encoder, a decoder that looks at it, a head.

    Attributes:
      encoder: the bidirectional blocks.
      decoder: the causal blocks with cross-attention.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        encoder: Callable[..., Encoder] = Encoder,
        decoder: Callable[..., Decoder] = Decoder,
    ):
        super().__init__(key, config)
        self.encoder = encoder(named_key(key, "encoder"), config)
        self.decoder = decoder(named_key(key, "decoder"), config, cross=True)

    def prefix(self, key: Key[Array, ""] | None = None) -> EncoderPrefix | None:
        """The prompt, run ahead of all rows where the encoder says that it can be."""
        key = optional_key(key, "encoder")
        stream = self.encoder.prefix_stream(key)
        if stream is None:
            return None
        (encoded,), (made,) = self._run_encoder([stream], (), key, keep=True)
        return EncoderPrefix(made, self.decoder.cross_keys_values(encoded))

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: EncoderPrefix | None = None,
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        inputs = RowInfo.from_inputs(batch, self.config.vocabulary_size)
        rows = RowInfo.from_targets(batch)
        shifted = self._decoder_inputs(batch.targets, rows)
        stream = self._target_stream(shifted, rows, key)
        encoded = self.encode(
            batch.tokens,
            inputs,
            readers=stream.segments,
            prefix=prefix,
            key=key,
            by_block=self.decoder.rematerialization.policy != "none",
        )
        (hidden,), _ = self.decoder.run(
            [stream],
            past=self.decoder.prefix_contexts(rows),
            cross=encoded,
            key=optional_key(key, "decoder"),
        )
        positions, length = batch.loss_positions, shifted.shape[1]
        places = self.decoder.stream_positions(positions, rows, length)
        picked = jnp.take_along_axis(hidden, places[..., None], axis=1, mode="clip")
        return self._normalize_output(picked, key)

    def _decoder_inputs(
        self, targets: Int[Array, "B U"], rows: RowInfo
    ) -> Int[Array, "B U"]:
        """The decoder's inputs: the start of each example, then its targets."""
        start = jnp.full_like(targets[:, :1], self.config.decoder_start_id)
        shifted = jnp.concatenate([start, targets[:, :-1]], axis=1)
        first = rows.positions_in_example(targets.shape[1]) == 0
        return jnp.where(first, self.config.decoder_start_id, shifted)

    def _target_stream(self, shifted: Int[Array, "B U"], rows: RowInfo, key) -> Stream:
        text = self.token_embedder(shifted, self.config.dtype)
        stream = self.decoder.text_stream(text, rows, key)
        hidden = dropout(
            stream.hidden.astype(self.config.dtype),
            self.config.dropout_rate,
            optional_key(key, "decoder_input"),
            stream.dropout_index,
        )
        return dataclasses.replace(stream, hidden=hidden)

    def encode(
        self,
        tokens: Int[Array, "B T"],
        rows: RowInfo,
        *,
        readers: Int[Array, "B Q"] | None = None,
        prefix: EncoderPrefix | None = None,
        key: Key[Array, ""] | None = None,
        by_block: bool = False,
    ) -> tuple[Context, ...]:
        """Runs the encoder; gives what the decoder's blocks see of its output.

        Args:
          tokens: rows, padded on the right.
          rows: what is known of them.
          readers: in packed rows, the example that each position of the decoder reads.
          prefix: the prompt, where it was run before.
          key: for dropout; None for none.
          by_block: whether each block of the decoder makes its keys and values itself:
            those of all blocks, and their gradients, are most of what a decoder keeps
            that computes all else again.
        """
        key = optional_key(key, "encoder")
        text = self.token_embedder(tokens, self.config.dtype)
        streams = [self.encoder.text_stream(text, rows, key)]
        past = self.encoder.prefix_contexts(rows)
        ahead = self.encoder.prefix_stream(key)
        made: list[KeyValues | Array] = []
        if ahead is not None and prefix is not None:
            past = (
                *past,
                self.encoder.visible_to(ahead, rows).as_context(prefix.key_values),
            )
            made.append(prefix.cross)
        elif ahead is not None:
            streams.insert(0, self.encoder.visible_to(ahead, rows))
        outputs, _ = self._run_encoder(streams, past, key)
        made += outputs if by_block else map(self.decoder.cross_keys_values, outputs)
        return self._cross_contexts(made, ahead, streams[-1], rows, readers)

    def _cross_contexts(
        self,
        made: Sequence[KeyValues | Array],
        ahead: Stream | None,
        text: Stream,
        rows: RowInfo,
        readers: Int[Array, "B Q"] | None,
    ) -> tuple[Context, ...]:
        """What the decoder sees of the encoder's output, the prompt's first."""
        mask = text.context_mask
        if readers is not None and text.segments is not None:
            mask = masks.segment_mask(readers, text.segments)
            rows = rows._replace(segment_ids=readers)
        seen = [] if ahead is None else [self.encoder.visible_to(ahead, rows)]
        contexts = [(stream.context_mask, stream.context_rows) for stream in seen]
        return tuple(
            Context(key_values, mask, of_rows)
            for key_values, (mask, of_rows) in zip(
                made, (*contexts, (mask, None)), strict=True
            )
        )

    def _run_encoder(self, streams: Sequence[Stream], past, key, keep=False):
        """The encoder's outputs, and the keys and values that it made if kept."""
        rate = self.config.dropout_rate
        entered = [
            dataclasses.replace(
                stream,
                hidden=dropout(
                    stream.hidden.astype(self.config.dtype),
                    rate,
                    optional_key(key, f"input_{i}"),
                    stream.dropout_index,
                ),
            )
            for i, stream in enumerate(streams)
        ]
        hidden, made = self.encoder.run(
            entered, past=past, key=optional_key(key, "blocks"), keep=keep
        )
        normed = [self.encoder.final_norm(x) for x in hidden]
        return [
            dropout(x, rate, optional_key(key, f"output_{i}"), stream.dropout_index)
            for i, (x, stream) in enumerate(zip(normed, streams, strict=True))
        ], made

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Encodes the rows given, and makes room for `capacity` target tokens.

        Args:
          tokens: rows, padded on the right.
          lengths: real tokens of each row.
          capacity: tokens that may follow.
          prompt_ids: which prompt each row has; see `Batch`.

        Returns:
          the hidden state that predicts each row's first target, and the cache.
        """
        soft, none = tokens - self.config.vocabulary_size, jnp.zeros_like(lengths)
        encoded = self.encode(tokens, RowInfo(lengths, none, None, prompt_ids, soft))
        rows = RowInfo(jnp.ones_like(lengths), none, None, prompt_ids)
        start = jnp.full_like(tokens[:, :1], self.config.decoder_start_id)
        stream, past = (
            self._target_stream(start, rows, None),
            self.decoder.prefix_contexts(rows),
        )
        (hidden,), (made,) = self.decoder.run(
            [stream], past=past, cross=encoded, keep=True
        )
        place = self.decoder.stream_positions(none[:, None], rows, 1)
        picked = jnp.take_along_axis(hidden, place[..., None], axis=1)
        cache = Cache.create(
            self.config,
            rows.lengths + self.decoder.prompt_count(),
            past=(*past, stream.as_context(made)),
            capacity=capacity,
            cross=encoded,
        )
        return self._normalize_output(picked, None)[:, 0], cache

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self.token_embedder(tokens[:, None], self.config.dtype)
        (hidden,), (made,) = self.decoder.run(
            [cache.stream(embedded)],
            past=cache.contexts(),
            cross=cache.cross,
            keep=True,
        )
        return self._normalize_output(hidden, None)[:, 0], cache.append(made)

    def _normalize_output(self, hidden, key):
        normed = self.decoder.final_norm(hidden)
        if self.config.scale_tied_hidden:
            normed = normed * self.config.width**-0.5
        places = DropoutIndex.for_rows(
            normed.shape, collectives.row_range(len(normed)).first
        )
        own = optional_key(key, "output")
        return dropout(normed, self.config.dropout_rate, own, places)
