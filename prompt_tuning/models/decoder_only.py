"""Models with a single stack; the config makes one a Llama, a BERT or another family.

The bare model has no prompt. Prompted decoders override the methods of `Decoder` and
`Stack` that return nothing here (`prefix_stream`, `prefix_contexts`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.adapted_rows import invoked_positions
from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key, optional_key
from prompt_tuning.models import input_layers
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.norms import normalize
from prompt_tuning.models.row_info import RowInfo, last_vectors, positions_in_segment
from prompt_tuning.models.streams import Context, Kept, Stream
from prompt_tuning.models.transformer import Stack
from prompt_tuning.prompts.class_rows import mean_states


class DecoderPrefix(NamedTuple):
    """Result of running a prompt ahead of the text.

    Attributes:
      kept: the prompt's keys and values, `[L, G, N, P, K]`, and the states after it.
      hidden: hidden states, `[N, P, D]`; the last one predicts the first token.
    """

    kept: Kept
    hidden: Float[Array, "N P D"]


class Decoder(Stack):
    """The blocks: causal, or bidirectional in an encoder-only model."""

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, cross: bool):
        super().__init__(
            key, config, layers=config.layers, cross=cross, bidirectional=False
        )

    def last_hidden(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """Returns the last hidden state of each row of `prefix_stream`."""
        return hidden[:, -1]

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the stream of the batch's rows; here the text alone."""
        del key
        stream = causal_stream(text, rows.segment_ids)
        if self.config.bidirectional:
            mask = input_mask(rows, text.shape[1])
            stream = dataclasses.replace(stream, mask=mask)
        mask = masks.encoder_mask(rows.lengths, text.shape[1])
        return dataclasses.replace(stream, context_mask=mask, lengths=rows.lengths)

    def stream_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Maps token positions to positions in the text's stream; here the same.

        Position `T` means after the last token.
        """
        del rows, text_length
        return positions

    def end_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Maps each example's last token to its last position in the stream.

        The arguments are the same as for `stream_positions`.
        """
        return self.stream_positions(positions, rows, text_length)


def causal_stream(
    hidden: Float[Array, "B T D"], segments: Int[Array, "B T"] | None = None
) -> Stream:
    """Returns rows that run causally; packed rows run segment by segment."""
    mask = masks.CausalMask(segments)
    if segments is None:
        return Stream(hidden, jnp.arange(hidden.shape[1])[None], mask)
    return Stream(hidden, positions_in_segment(segments), mask, segments=segments)


def input_mask(
    rows: RowInfo, length: int, sees: masks.Visibility | None = None
) -> Bool[Array, "#B 1 T T"]:
    """Builds a mask in which each example's input tokens see each other both ways.

    `sees` is what prompts attend to; everything if None.
    """
    inputs = rows.is_input(length)
    sees = sees or masks.Visibility()
    mask = masks.decoder_region_mask(inputs, jnp.zeros_like(inputs), sees)
    if rows.segment_ids is not None:
        mask &= masks.segment_mask(rows.segment_ids, rows.segment_ids)
    return mask


class DecoderOnly(LanguageModel):
    """Embedding, blocks, head.

    Attributes:
      type_embedder: table `[types, D]` of token types, or None.
      embedding_norm: norm of the input vectors, prompts included, or None.
      position_embedder: table `[positions, D]` of learned positions, or None.
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
        self.position_embedder = input_layers.position_embedder(key, config)
        self.type_embedder = input_layers.type_embedder(key, config)
        self.embedding_norm = input_layers.embedding_norm(key, config)
        self.decoder = decoder(named_key(key, "decoder"), config, cross=False)

    def select_predicting(
        self,
        text: Float[Array, "B S D"],
        positions: Int[Array, "B m"],
        rows: RowInfo,
        last: Float[Array, "N D"] | None,
        text_length: int,
    ) -> Float[Array, "B m D"]:
        """Selects the hidden state that predicts the token at each position.

        That is the state at the preceding token or prompt vector. An example's first
        token is predicted by `last`, the state at each prompt's last vector, if a
        prompt ran ahead. Otherwise nothing predicts it, and its loss weight must be
        zero.
        """
        in_stream = self.decoder.stream_positions(positions, rows, text_length)
        predicting = jnp.maximum(in_stream - 1, 0)  # [B, m]
        # [B, S, D] -> [B, m, D]
        selected = jnp.take_along_axis(text, predicting[..., None], axis=1, mode="clip")
        if last is None:
            return selected
        in_example, last = positions, last_vectors(last, positions, rows)
        if rows.segment_ids is not None:
            all_positions = positions_in_segment(rows.segment_ids)  # [B, T]
            in_example = jnp.take_along_axis(all_positions, positions, axis=1)
        return jnp.where(in_example[..., None] == 0, last, selected)

    def prefix(self, key: Key[Array, ""] | None = None) -> DecoderPrefix | None:
        """Runs the prompt once, ahead of all rows; None if it cannot run alone."""
        stream = self._prefix_stream(key)
        if stream is None:
            return None
        (hidden,), (kept,) = self.decoder.run(
            [stream], key=optional_key(key, "prefix"), keep=True
        )
        return DecoderPrefix(kept, hidden)

    def prompt_states(self, prefix: DecoderPrefix) -> Float[Array, "N P D"]:
        """Returns the state after each prompt vector, which predicts the next one."""
        return self._normalize_output(prefix.hidden)

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: DecoderPrefix | None = None,
    ) -> Float[Array, "B m D"]:
        """Computes the hidden states that predict the targets at `loss_positions`."""
        if batch.answers > 1:
            return self._answer_states(batch, key, prefix)
        rows = RowInfo.from_inputs(batch, self.config.vocabulary_size)
        stream = self._text_stream(batch.tokens, rows, key)
        (text,), last = self._run_after_prompts([stream], rows, key, prefix)
        length = batch.tokens.shape[1]
        if self.pooling != "last":
            pooled = self._pool(text, rows, length)[:, None]  # [B, 1, D]
            return jnp.repeat(pooled, batch.loss_positions.shape[1], axis=1)
        if self.config.labels:
            tags_tokens = self.config.problem == "tokens"
            decoder = self.decoder
            at = decoder.stream_positions if tags_tokens else decoder.end_positions
            ends = at(batch.loss_positions, rows, length)  # [B, m]
            states = jnp.take_along_axis(text, ends[..., None], axis=1, mode="clip")
            return self._normalize_output(states)
        # Only the m predicting states of each row are normalized: [B, m, D].
        states = self.select_predicting(text, batch.loss_positions, rows, last, length)
        return self._normalize_output(states)

    def _run_after_prompts(
        self,
        streams: list[Stream],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
        prefix: DecoderPrefix | None = None,
    ) -> tuple[list[Float[Array, "_ _ D"]], Float[Array, "N D"] | None]:
        """Runs streams of rows, after the prompts unless these already ran.

        Returns:
          each stream's hidden states, and the hidden state of each prompt's last
          vector; None if no prompt runs ahead.
        """
        past, prompts = self.decoder.prefix_contexts(rows), self._prefix_stream(key)
        if prompts is not None:
            prompts = self.decoder.visible_to(prompts, rows)
            if prefix is None:
                streams = [prompts, *streams]
            else:
                past = (*past, prompts.as_context(prefix.kept))
        hidden, _ = self.decoder.run(
            streams, past=past, key=optional_key(key, "decoder")
        )
        if prefix is not None:
            return hidden, self.decoder.last_hidden(prefix.hidden)
        if prompts is not None:
            return hidden[1:], self.decoder.last_hidden(hidden[0])
        return hidden, None

    def label_states(
        self,
        batch: LabelBatch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: DecoderPrefix | None = None,
    ) -> tuple[Float[Array, "B D"], Float[Array, "R Q D"] | None]:
        """Computes the states that predict labels; see `LanguageModel.label_states`."""
        lengths, ids = batch.lengths, batch.tokens - self.config.vocabulary_size
        rows = RowInfo(lengths, lengths, None, batch.prompt_ids, ids)
        start = lengths + self.decoder.prompt_count()
        labels = [
            self._add_positions(stream, optional_key(key, "label_input"))
            for stream in self._label_streams(batch, start)
        ]
        text_stream = self._text_stream(batch.tokens, rows, key)
        streams = [text_stream, *labels]
        (text, *later), last = self._run_after_prompts(streams, rows, key, prefix)
        if self.pooling != "last":
            return self._pool(text, rows, batch.tokens.shape[1]), None
        # The first token of a label is predicted as the one at position `lengths`.
        first = self.select_predicting(
            text, lengths[:, None], rows, last, batch.tokens.shape[1]
        )
        first = self._normalize_output(first)[:, 0]
        return first, self._normalize_output(later[0]) if later else None

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads rows and allocates a cache; see `LanguageModel.prefill`."""
        vector_ids = tokens - self.config.vocabulary_size
        rows = RowInfo(lengths, lengths, None, prompt_ids, vector_ids)
        past, prefix = self.decoder.prefix_contexts(rows), self.prefix()
        if prefix is not None:
            prompts = self._prefix_stream(None)
            assert prompts is not None
            prompts = self.decoder.visible_to(prompts, rows)
            past = (*past, prompts.as_context(prefix.kept))
        stream = self._text_stream(tokens, rows, None)
        (hidden,), (kept,) = self.decoder.run([stream], past=past, keep=True)
        last = None if prefix is None else self.decoder.last_hidden(prefix.hidden)
        # The token after the last one is predicted: position `lengths`, [B, 1, D].
        states = self.select_predicting(
            hidden, lengths[:, None], rows, last, tokens.shape[1]
        )
        cache = Cache.create(
            lengths + self.decoder.prompt_count(),
            past=(*past, stream.as_context(kept)),
            capacity=capacity,
            active=None if stream.active is None else stream.active.any(1),
        )
        return self._normalize_output(states)[:, 0], cache

    def extend(
        self,
        stream: Stream,
        past: Sequence[Context],
        cross: Sequence[Context] = (),
    ) -> tuple[Float[Array, "B Q D"], Kept]:
        """Reads more tokens of rows; see `LanguageModel.extend`."""
        del cross
        (hidden,), (kept,) = self.decoder.run(
            [self._add_positions(stream, None)], past=past, keep=True
        )
        return self._normalize_output(hidden), kept

    def _pool(
        self, text: Float[Array, "B S D"], rows: RowInfo, length: int
    ) -> Float[Array, "B D"]:
        """Computes the normalized state of each row that a class head reads.

        Depending on the config it is the state at the first position (of a prompt, if
        that comes first) or the mean over the row's input tokens. Rows have one example
        each.
        """
        if self.pooling == "first":
            return self._normalize_output(text[:, :1])[:, 0]
        positions = jnp.tile(jnp.arange(length), (len(text), 1))  # [B, T]
        in_stream = self.decoder.stream_positions(positions, rows, length)
        states = jnp.take_along_axis(text, in_stream[..., None], axis=1, mode="clip")
        normed = normalize(self.decoder.final_norm, states)
        return self._head_inputs(mean_states(normed, rows.is_input(length)))

    def _normalize_output(self, states: Float[Array, "B m D"]) -> Float[Array, "B m D"]:
        """Applies the final norm, the head's transform and the logit multiplier."""
        return self._head_inputs(normalize(self.decoder.final_norm, states))

    def _head_inputs(self, normed: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Turns normalized states into the inputs of the output head."""
        if self.head is not None and self.head.transform is not None:
            normed = self.head.transform(normed, self.class_rows)
        multiplier = self.config.logit_multiplier
        return normed if multiplier == 1 else normed * multiplier

    def _prefix_stream(self, key) -> Stream | None:
        stream = self.decoder.prefix_stream(key)
        if stream is None:
            return None
        return self._add_positions(stream, optional_key(key, "prefix_input"))

    def _text_stream(self, tokens, rows: RowInfo, key) -> Stream:
        text = self.token_embedder(tokens, self.config.dtype)
        if self.type_embedder is not None and self.config.separator_id is not None:
            # Prompts and these tokens get the first type where they are joined.
            first, second, *_ = self.type_embedder.embedding[...].astype(text.dtype)
            arguments = tokens, rows.segment_ids, self.config.separator_id
            text += input_layers.second_types(*arguments)[..., None] * (second - first)
        stream = self.decoder.text_stream(text, rows, key)
        if self.invocation:
            segments = rows.segments(tokens.shape[1])
            active = invoked_positions(tokens, segments, self.invocation)
            stream = dataclasses.replace(stream, active=active)
        return self._add_positions(stream, optional_key(key, "input"))

    def _add_positions(self, stream: Stream, key) -> Stream:
        """Adds learned positions, also to prompt vectors; see `embed_inputs`."""
        layers = self.position_embedder, self.embedding_norm
        return input_layers.embed_inputs(
            stream, self.config, *layers, key, self.type_embedder
        )
