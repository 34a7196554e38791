"""The decoder-only model: Llama, Qwen2 and GPT-2, by the choices in its config."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.data.batches import Batch
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Embedding, dropout
from prompt_tuning.models.parameters import named_key, optional_key
from prompt_tuning.models.transformer import Past, Stack, Stream


class Decoder(Stack):
    """A causal stack.

    Attributes:
      prompt_length: vectors `P` that stand among the text; 0 without a prompt.
    """

    prompt_length = 0

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, cross: bool):
        super().__init__(
            key, config, layers=config.layers, cross=cross, bidirectional=False
        )

    def streams(
        self,
        text: Float[Array, "B T D"],
        lengths: Int[Array, "B"],
        prefix_lengths: Int[Array, "B"],
    ) -> tuple[Stream, ...]:
        """What runs through the blocks: here the text alone, causally.

        Args:
          text: embedded tokens.
          lengths: real tokens of each row.
          prefix_lengths: leading tokens of each row that are given and not learned.
        """
        del prefix_lengths
        return (causal_stream(text, lengths),)


def causal_stream(
    text: Float[Array, "B T D"], lengths: Int[Array, "B"], first: int = 0
) -> Stream:
    """Rows that run causally, their first token at position `first`."""
    length = text.shape[1]
    return Stream(
        text,
        first + jnp.arange(length)[None],
        (masks.decoder_causal_mask(length),),
        later_mask=masks.encoder_mask(lengths, length),
    )


DecoderFactory = Callable[..., Decoder]


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
        decoder: DecoderFactory = Decoder,
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
        hidden: tuple[Float[Array, "_ _ D"], ...],
        positions: Int[Array, "B m"],
        prefix_lengths: Int[Array, "B"],
    ) -> Float[Array, "B m D"]:
        """Picks the hidden state that predicts the token at each position of the row.

        Token `i` is predicted where token `i - 1` is read; token 0 by nothing, so its
        pick is of no use and its weight must be zero.
        """
        del prefix_lengths
        (text,) = hidden
        before = jnp.maximum(positions - 1, 0)
        return jnp.take_along_axis(text, before[..., None], axis=1)

    def hidden(
        self, batch: Batch, key: Key[Array, ""] | None = None
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        streams = self._streams(batch.tokens, batch.lengths, batch.prefix_lengths, key)
        hidden, _ = self.decoder.run(streams, key=optional_key(key, "decoder"))
        picked = self.predicting(hidden, batch.loss_positions, batch.prefix_lengths)
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
        streams = self._streams(tokens, lengths, lengths, None)
        hidden, made = self.decoder.run(streams, keep=True)
        picked = self.predicting(hidden, lengths[:, None], lengths)
        past = tuple(
            Past(key_values, stream.positions)
            for key_values, stream in zip(made, streams, strict=True)
        )
        cache = Cache.create(
            self.config,
            lengths + self.decoder.prompt_length,
            past=past,
            past_masks=tuple(stream.later_mask for stream in streams),
            room=room,
        )
        return self.decoder.final_norm(picked)[:, 0], cache

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        embedded = self.token_embedder(tokens[:, None], self.config.dtype)
        streams = self._with_positions((cache.stream(embedded),), None)
        (hidden,), (made,) = self.decoder.run(streams, past=cache.sources(), keep=True)
        return self.decoder.final_norm(hidden)[:, 0], cache.extended(made)

    def _streams(self, tokens, lengths, prefix_lengths, key) -> tuple[Stream, ...]:
        text = self.token_embedder(tokens, self.config.dtype)
        streams = self.decoder.streams(text, lengths, prefix_lengths)
        return self._with_positions(streams, key)

    def _with_positions(self, streams, key) -> tuple[Stream, ...]:
        """Adds learned positions, to prompt vectors too, then drops out."""
        changed = []
        for i, stream in enumerate(streams):
            hidden = stream.hidden
            if self.position_embedder is not None:
                hidden = hidden + self.position_embedder(
                    stream.positions, self.config.dtype
                )
            hidden = dropout(
                hidden, self.config.dropout_rate, optional_key(key, f"input_{i}")
            )
            changed.append(dataclasses.replace(stream, hidden=hidden))
        return tuple(changed)
