"""The encoder-decoder model: T5 1.0 and 1.1, by the choices in its config."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.data.batches import Batch
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import dropout
from prompt_tuning.models.parameters import named_key, optional_key
from prompt_tuning.models.transformer import Stack, Stream


class Encoder(Stack):
    """A stack in which all real tokens of a row see each other.

    Attributes:
      prompt_length: vectors `P` that stand among the text; 0 without a prompt.
    """

    prompt_length = 0

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        super().__init__(
            key, config, layers=config.encoder_layers, cross=False, bidirectional=True
        )

    def stream(self, text: Float[Array, "B T D"], lengths: Int[Array, "B"]) -> Stream:
        """What runs through the blocks: here the text alone.

        Args:
          text: embedded tokens.
          lengths: real tokens of each row.
        """
        return encoder_stream(text, lengths)


def encoder_stream(hidden: Float[Array, "B S D"], lengths: Int[Array, "B"]) -> Stream:
    """Rows of which the first `lengths[b]` positions see each other."""
    length = hidden.shape[1]
    mask = masks.encoder_mask(lengths, length)
    return Stream(hidden, jnp.arange(length)[None], (mask,))


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

    def encoder_decoder_mask(
        self, lengths: Int[Array, "B"], length: int
    ) -> Bool[Array, "B 1 1 S"]:
        """What the decoder sees of encoder rows of `length` tokens."""
        return masks.encoder_decoder_mask(lengths, length)

    def hidden(
        self, batch: Batch, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        encoded = self.encode(batch.tokens, batch.lengths, key)
        start = jnp.full_like(batch.targets[:, :1], self.config.decoder_start_id)
        shifted = jnp.concatenate([start, batch.targets[:, :-1]], axis=1)
        embedded = self._embed(shifted, optional_key(key, "decoder_input"))
        length = shifted.shape[1]
        stream = Stream(
            embedded,
            jnp.arange(length)[None],
            (masks.decoder_causal_mask(length),),
            cross_mask=self.encoder_decoder_mask(batch.lengths, batch.tokens.shape[1]),
        )
        (hidden,), _ = self.decoder.run(
            [stream],
            cross=self.decoder.cross_keys_values(encoded),
            key=optional_key(key, "decoder"),
        )
        picked = jnp.take_along_axis(hidden, batch.loss_positions[..., None], axis=1)
        return self._finish(picked, key)

    def encode(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """Runs the encoder; with a prompt `S = P + T`."""
        text = self.token_embedder(tokens, self.config.dtype)
        stream = self.encoder.stream(text, lengths)
        dropped = dropout(
            stream.hidden, self.config.dropout_rate, optional_key(key, "encoder_input")
        )
        stream = dataclasses.replace(stream, hidden=dropped)
        (hidden,), _ = self.encoder.run([stream], key=optional_key(key, "encoder"))
        encoded = self.encoder.final_norm(hidden)
        return dropout(
            encoded, self.config.dropout_rate, optional_key(key, "encoder_output")
        )

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"], room: int
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Encodes the rows given and makes room for `room` target tokens.

        Returns:
          the hidden state that predicts each row's first target, and the cache.
        """
        encoded = self.encode(tokens, lengths)
        cache = Cache.create(
            self.config,
            jnp.zeros_like(lengths),
            room=room + 1,
            cross=self.decoder.cross_keys_values(encoded),
            cross_mask=self.encoder_decoder_mask(lengths, tokens.shape[1]),
        )
        return self.decode(jnp.full_like(lengths, self.config.decoder_start_id), cache)

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self._embed(tokens[:, None], None)
        (hidden,), (made,) = self.decoder.run(
            [cache.stream(embedded)],
            past=cache.sources(),
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
