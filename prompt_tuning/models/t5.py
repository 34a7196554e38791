"""The encoder-decoder model: T5 1.0 and 1.1, by the choices in its config."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.data.batches import Batch
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import dropout
from prompt_tuning.models.parameters import named_key, optional_key
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.models.transformer import Stack


class Encoder(Stack):
    """A stack in which all real tokens of a row see each other."""

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        super().__init__(
            key, config, layers=config.encoder_layers, cross=False, bidirectional=True
        )

    def prefix_stream(self) -> Stream | None:
        """What runs ahead of all rows, once for all of them; here nothing."""
        return None

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        lengths: Int[Array, "B"],
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> Stream:
        """What runs for each row: here the text alone.

        Args:
          text: embedded tokens.
          lengths: real tokens of each row.
          prompt_ids: which prompt each row has; see `Batch`.
        """
        del prompt_ids
        return encoder_stream(text, lengths)


def encoder_stream(
    hidden: Float[Array, "R S D"], lengths: Int[Array, "_"], first: masks.Count = 0
) -> Stream:
    """Rows of which the first `lengths[b]` positions see each other.

    Their positions count from `first`.
    """
    length = hidden.shape[1]
    mask = masks.encoder_mask(lengths, length)
    positions = first + jnp.arange(length)[None]
    return Stream(hidden, positions, mask, later_mask=mask)


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
    ):
        super().__init__(key, config)
        self.encoder = encoder(named_key(key, "encoder"), config)
        self.decoder = Decoder(named_key(key, "decoder"), config, cross=True)

    def prefix(self, key: Key[Array, ""] | None = None) -> EncoderPrefix | None:
        """The prompt, run ahead of all rows where the encoder says that it can be."""
        stream = self.encoder.prefix_stream()
        if stream is None:
            return None
        key = optional_key(key, "encoder")
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
        start = jnp.full_like(batch.targets[:, :1], self.config.decoder_start_id)
        shifted = jnp.concatenate([start, batch.targets[:, :-1]], axis=1)
        embedded = self._embed(shifted, optional_key(key, "decoder_input"))
        length = shifted.shape[1]
        mask = masks.decoder_causal_mask(length)
        encoded = self.encode(
            batch.tokens, batch.lengths, batch.prompt_ids, prefix=prefix, key=key
        )
        (hidden,), _ = self.decoder.run(
            [Stream(embedded, jnp.arange(length)[None], mask)],
            cross=encoded,
            key=optional_key(key, "decoder"),
        )
        picked = jnp.take_along_axis(
            hidden, batch.loss_positions[..., None], axis=1, mode="clip"
        )
        return self._finish(picked, key)

    def encode(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        prompt_ids: Int[Array, "B"] | None = None,
        *,
        prefix: EncoderPrefix | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Context, ...]:
        """Runs the encoder; gives what the decoder's blocks see of its output.

        Args:
          tokens: rows, padded on the right.
          lengths: real tokens of each row.
          prompt_ids: see `Batch`.
          prefix: the prompt, where it was run before.
          key: for dropout; None for none.
        """
        text = self.token_embedder(tokens, self.config.dtype)
        streams = [self.encoder.text_stream(text, lengths, prompt_ids)]
        ahead = self.encoder.prefix_stream()
        if ahead is not None:
            ahead = dataclasses.replace(ahead, later_rows=prompt_ids)
        key = optional_key(key, "encoder")
        if ahead is None or prefix is None:
            streams = streams if ahead is None else [ahead, *streams]
            outputs, _ = self._run_encoder(streams, (), key)
            made = [self.decoder.cross_keys_values(output) for output in outputs]
        else:
            past = [ahead.context(prefix.key_values)]
            (output,), _ = self._run_encoder(streams, past, key)
            made = [prefix.cross, self.decoder.cross_keys_values(output)]
            streams = [ahead, *streams]
        return tuple(
            Context(key_values, stream.later_mask, stream.later_rows)
            for key_values, stream in zip(made, streams, strict=True)
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
                ),
            )
            for i, stream in enumerate(streams)
        ]
        hidden, made = self.encoder.run(
            entered, past=past, key=optional_key(key, "blocks"), keep=keep
        )
        normed = [self.encoder.final_norm(x) for x in hidden]
        return [
            dropout(x, rate, optional_key(key, f"output_{i}"))
            for i, x in enumerate(normed)
        ], made

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], room: int
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Encodes the rows given and makes room for `room` target tokens.

        Returns:
          the hidden state that predicts each row's first target, and the cache.
        """
        cache = Cache.create(
            self.config,
            jnp.zeros_like(lengths),
            room=room + 1,
            cross=self.encode(tokens, lengths),
        )
        return self.decode(jnp.full_like(lengths, self.config.decoder_start_id), cache)

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self._embed(tokens[:, None], None)
        (hidden,), (made,) = self.decoder.run(
            [cache.stream(embedded)],
            past=cache.contexts(),
            cross=cache.cross,
            keep=True,
        )
        return self._finish(hidden, None)[:, 0], cache.extended(made)

    def _embed(self, tokens, key):
        embedded = self.token_embedder(tokens, self.config.dtype)
        return dropout(embedded, self.config.dropout_rate, key)

    def _finish(self, hidden, key):
        normed = self.decoder.final_norm(hidden)
        if self.config.scale_tied_hidden:
            normed = normed * self.config.width**-0.5
        return dropout(normed, self.config.dropout_rate, optional_key(key, "output"))
