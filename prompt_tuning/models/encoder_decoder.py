"""The encoder-decoder model; the config makes it a T5, a BART or another family.

The encoder reads a batch's `tokens`, the decoder its `targets` shifted by one (Raffel
et al. 2020). The bare model has no prompt: prompted encoders and decoders override the
methods of `Stack` that return nothing here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key, optional_key
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.input_layers import InputLayers
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import TokenEmbedding
from prompt_tuning.models.norms import normalize
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import Context, Kept, Stream
from prompt_tuning.models.transformer import Stack
from prompt_tuning.sharding import collectives


class Encoder(Stack):
    """Blocks in which all real tokens of a row attend to each other."""

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        super().__init__(
            key, config, layers=config.encoder_layers, cross=False, bidirectional=True
        )

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the stream of the batch's rows; here the text alone."""
        del key
        stream = encoder_stream(text, rows.lengths)
        if rows.segment_ids is None:
            return stream
        return dataclasses.replace(
            stream,
            positions=rows.positions_in_example(text.shape[1]),
            mask=masks.segment_mask(rows.segment_ids, rows.segment_ids),
            segments=rows.segment_ids,
        )


def encoder_stream(hidden: Float[Array, "R S D"], lengths: Int[Array, "_"]) -> Stream:
    """Returns rows whose first `lengths[b]` positions attend to each other."""
    length = hidden.shape[1]
    mask = masks.encoder_mask(lengths, length)
    return Stream(hidden, jnp.arange(length)[None], mask, context_mask=mask)


class EncoderPrefix(NamedTuple):
    """Result of running a prompt through the encoder ahead of the text.

    Attributes:
      key_values: keys and values in the encoder's blocks, `[L, G, N, P, K]`.
      cross: keys and values for the decoder's blocks, of the same shape.
    """

    key_values: KeyValues
    cross: KeyValues


class EncoderDecoder(LanguageModel):
    """Embedding table, encoder, decoder with cross-attention, head.

    Attributes:
      encoder: the bidirectional blocks.
      decoder: the causal blocks with cross-attention.
      encoder_inputs: layers before the encoder's blocks.
      decoder_inputs: layers before the decoder's blocks.
      decoder_embedder: the decoder's embedding table `[V, D]`; None if it shares the
        encoder's.
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
        self.encoder_inputs = InputLayers(named_key(key, "encoder_inputs"), config)
        self.decoder_inputs = InputLayers(named_key(key, "decoder_inputs"), config)
        self.decoder_embedder = (
            TokenEmbedding(
                named_key(key, "decoder_embedder"),
                config,
                config.vocabulary_size,
                "vocab",
            )
            if config.separate_tables
            else None
        )

    @property
    def output_embedder(self) -> TokenEmbedding:
        """Embedding table of generated tokens, also the kernel of a tied head."""
        return (
            self.token_embedder
            if self.decoder_embedder is None
            else self.decoder_embedder
        )

    def prefix(self, key: Key[Array, ""] | None = None) -> EncoderPrefix | None:
        """Runs the prompt once, ahead of all rows; None if it cannot run alone."""
        key = optional_key(key, "encoder")
        stream = self.encoder.prefix_stream(key)
        if stream is None:
            return None
        (encoded,), (kept,) = self._run_encoder([stream], (), key, keep=True)
        cross = self.decoder.cross_keys_values(
            encoded, optional_key(key, "decoder"), shared=True
        )
        return EncoderPrefix(kept.key_values, cross)

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: EncoderPrefix | None = None,
    ) -> Float[Array, "B m D"]:
        """Computes the hidden states that predict the targets at `loss_positions`."""
        if batch.answers > 1:
            return self._answer_states(batch, key, prefix)
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
            by_block=self._by_block,
        )
        (hidden,), _ = self.decoder.run(
            [stream],
            past=self.decoder.prefix_contexts(rows),
            cross=encoded,
            key=optional_key(key, "decoder"),
        )
        positions, length = batch.loss_positions, shifted.shape[1]
        in_stream = self.decoder.stream_positions(positions, rows, length)  # [B, m]
        # Only the m predicting states of each row are normalized: [B, m, D].
        states = jnp.take_along_axis(hidden, in_stream[..., None], axis=1, mode="clip")
        return self._normalize_output(states, key)

    @property
    def _by_block(self) -> bool:
        """Whether each decoder block projects the encoder's output itself."""
        return self.decoder.rematerialization.policy != "none"

    def label_states(
        self,
        batch: LabelBatch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: EncoderPrefix | None = None,
    ) -> tuple[Float[Array, "B D"], Float[Array, "R Q D"] | None]:
        """Computes the states that predict labels; see `LanguageModel.label_states`.

        The decoder reads one start token for each text. For a class head it reads the
        text, and the state after its last token is the one to classify.
        """
        if self.config.labels:
            ends = batch.lengths[:, None] - 1
            arguments = batch.tokens, batch.lengths, batch.tokens, ends
            ones, none = jnp.ones_like(ends, jnp.float32), jnp.zeros_like(batch.lengths)
            rows = Batch(*arguments, ones, none, prompt_ids=batch.prompt_ids)
            return self.hidden(rows)[:, 0], None
        lengths, ids = batch.lengths, batch.tokens - self.config.vocabulary_size
        inputs = RowInfo(lengths, jnp.zeros_like(lengths), None, batch.prompt_ids, ids)
        encoded = self.encode(
            batch.tokens, inputs, prefix=prefix, key=key, by_block=self._by_block
        )
        rows, start = self._start_stream(lengths, batch.prompt_ids, key)
        after = jnp.atleast_1d(1 + self.decoder.prompt_count())
        labels = [
            self.decoder_inputs(stream, optional_key(key, "label_input"))
            for stream in self._label_streams(batch, after)
        ]
        (hidden, *later), _ = self.decoder.run(
            [start, *labels],
            past=self.decoder.prefix_contexts(rows),
            cross=encoded,
            key=optional_key(key, "decoder"),
        )
        first = self._normalize_output(self._first_state(hidden, rows), key)[:, 0]
        return first, self._normalize_output(later[0], key) if later else None

    def _start_stream(
        self, lengths: Int[Array, "B"], prompt_ids, key=None
    ) -> tuple[RowInfo, Stream]:
        """Describes decoder rows of a single start token, and returns their stream."""
        none = jnp.zeros_like(lengths)
        rows = RowInfo(jnp.ones_like(lengths), none, None, prompt_ids)
        start = jnp.full_like(lengths[:, None], self.config.decoder_start_id)
        return rows, self._target_stream(start, rows, key)

    def _first_state(
        self, hidden: Float[Array, "B S D"], rows: RowInfo
    ) -> Float[Array, "B 1 D"]:
        """Selects the state that predicts the first target."""
        first = jnp.zeros_like(rows.lengths)[:, None]
        in_stream = self.decoder.stream_positions(first, rows, 1)  # [B, 1]
        return jnp.take_along_axis(hidden, in_stream[..., None], axis=1)

    def _decoder_inputs(
        self, targets: Int[Array, "B U"], rows: RowInfo
    ) -> Int[Array, "B U"]:
        """Puts each example's start token before its targets, and drops the last."""
        start = jnp.full_like(targets[:, :1], self.config.decoder_start_id)
        shifted = jnp.concatenate([start, targets[:, :-1]], axis=1)
        first = rows.positions_in_example(targets.shape[1]) == 0
        return jnp.where(first, self.config.decoder_start_id, shifted)

    def _target_stream(self, shifted: Int[Array, "B U"], rows: RowInfo, key) -> Stream:
        text = self.output_embedder(shifted, self.config.dtype)
        stream = self.decoder.text_stream(text, rows, key)
        return self.decoder_inputs(stream, optional_key(key, "decoder_input"))

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
        """Runs the encoder and returns its output as the decoder's blocks attend to it.

        Args:
          tokens: rows, padded on the right.
          rows: description of the rows.
          readers: in packed rows, the example that each decoder position belongs to.
          prefix: result of `prefix`, if it ran before.
          key: random key for dropout.
          by_block: True to let each decoder block compute its keys and values itself.
            Those of all blocks, with their gradients, are most of the memory of a
            decoder that rematerializes everything else.
        """
        decoder_key, key = (optional_key(key, x) for x in ("decoder", "encoder"))
        text = self.token_embedder(tokens, self.config.dtype)
        streams = [self.encoder.text_stream(text, rows, key)]
        past = self.encoder.prefix_contexts(rows)
        prompts = self.encoder.prefix_stream(key)
        sources: list[KeyValues | Array] = []
        if prompts is not None:
            visible = self.encoder.visible_to(prompts, rows)
            if prefix is None:
                streams.insert(0, visible)
            else:
                past = (*past, visible.as_context(Kept(prefix.key_values)))
                sources.append(prefix.cross)
        outputs, _ = self._run_encoder(streams, past, key)
        sources += (
            outputs
            if by_block
            else [
                self.decoder.cross_keys_values(
                    x, decoder_key, shared=x is not outputs[-1]
                )
                for x in outputs
            ]
        )
        return self._cross_contexts(sources, prompts, streams[-1], rows, readers)

    def _cross_contexts(
        self,
        sources: Sequence[KeyValues | Array],
        prompts: Stream | None,
        text: Stream,
        rows: RowInfo,
        readers: Int[Array, "B Q"] | None,
    ) -> tuple[Context, ...]:
        """Returns the contexts of the decoder's cross-attention, prompts first.

        `sources` are keys and values, or output, of each encoder stream: the `prompts`
        that ran ahead, if any, and the `text`. For `readers` see `encode`.
        """
        mask = text.context_mask
        if readers is not None and text.segments is not None:
            mask = masks.segment_mask(readers, text.segments)
            # Masks of the prompts are made for the decoder's positions, too.
            rows = rows._replace(segment_ids=readers)
        visible = [] if prompts is None else [self.encoder.visible_to(prompts, rows)]
        contexts = [(stream.context_mask, stream.context_rows) for stream in visible]
        return tuple(
            Context(source, mask, context_rows)
            for source, (mask, context_rows) in zip(
                sources, (*contexts, (mask, None)), strict=True
            )
        )

    def _run_encoder(self, streams: Sequence[Stream], past, key, keep=False):
        """Returns the encoder's outputs, and with `keep` its keys and values."""
        rate = self.config.dropout_rate
        inputs = [
            self.encoder_inputs(stream, optional_key(key, f"input_{i}"))
            for i, stream in enumerate(streams)
        ]
        hidden, kept = self.encoder.run(
            inputs, past=past, key=optional_key(key, "blocks"), keep=keep
        )
        # Of each stream, [R, S, D].
        normed = [normalize(self.encoder.final_norm, x) for x in hidden]
        return [
            dropout(x, rate, optional_key(key, f"output_{i}"), stream.dropout_index)
            for i, (x, stream) in enumerate(zip(normed, streams, strict=True))
        ], kept

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Encodes rows and allocates a cache; see `LanguageModel.prefill`."""
        ids, none = tokens - self.config.vocabulary_size, jnp.zeros_like(lengths)
        inputs = RowInfo(lengths, none, None, prompt_ids, ids)
        encoded = self.encode(tokens, inputs)
        rows, stream = self._start_stream(lengths, prompt_ids)
        past = self.decoder.prefix_contexts(rows)
        (hidden,), (kept,) = self.decoder.run(
            [stream], past=past, cross=encoded, keep=True
        )
        states = self._first_state(hidden, rows)
        cache = Cache.create(
            rows.lengths + self.decoder.prompt_count(),
            past=(*past, stream.as_context(kept)),
            capacity=capacity,
            cross=encoded,
        )
        return self._normalize_output(states, None)[:, 0], cache

    def extend(
        self,
        stream: Stream,
        past: Sequence[Context],
        cross: Sequence[Context] = (),
    ) -> tuple[Float[Array, "B Q D"], Kept]:
        """Reads more target tokens; see `LanguageModel.extend`."""
        (hidden,), (kept,) = self.decoder.run(
            [self.decoder_inputs(stream, None)], past=past, cross=cross, keep=True
        )
        return self._normalize_output(hidden, None), kept

    def _normalize_output(self, hidden, key):
        """Applies the final norm, T5 1.0's scale and dropout."""
        normed = normalize(self.decoder.final_norm, hidden)
        if self.config.scale_tied_hidden:
            normed = normed * self.config.width**-0.5
        index = DropoutIndex.for_rows(
            normed.shape, collectives.row_range(len(normed)).first
        )
        output_key = optional_key(key, "output")
        dropped = dropout(normed, self.config.dropout_rate, output_key, index)
        if self.head is None or self.head.transform is None:
            return dropped
        return self.head.transform(dropped, self.class_rows)
