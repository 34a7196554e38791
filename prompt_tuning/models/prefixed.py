"""The frozen models with trained keys and values before every row, in every block."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core import masks
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.models.t5 import Encoder
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.sharding import collectives


class _Prefixed:
    """What a prefixed encoder and a prefixed decoder have in common.

    Attributes:
      prompt: the module of the prefix.
    """

    config: ModelConfig
    prompt: KeyValuePrefix

    def prompt_count(self) -> masks.Count:
        """Positions of the prefix."""
        return self.prompt.length

    def prefix_contexts(self, rows: RowInfo) -> tuple[Context, ...]:
        """The prefix, seen by every position of every row."""
        del rows
        whole = collectives.copy_to_shards(
            self.prompt().astype(self.config.dtype), "heads"
        )
        own = collectives.local_prefix_groups(whole)
        keys, values = own[:, 0, None], own[:, 1, None]
        positions = jnp.arange(self.prompt.length)[None]
        return (Context(KeyValues(keys, values), None, None, positions),)


class PrefixEncoder(_Prefixed, Encoder):
    """An encoder with trained keys and values before its input."""

    def __init__(
        self, key: Key[Array, ""], config: ModelConfig, *, prompt: KeyValuePrefix
    ):
        super().__init__(key, config)
        self.prompt = prompt

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """The text, at positions behind the prefix."""
        stream = super().text_stream(text, rows, key)
        places = rows.positions_in_example(text.shape[1])
        return dataclasses.replace(stream, positions=places).shift_positions(
            self.prompt.length
        )


class PrefixDecoder(_Prefixed, Decoder):
    """A decoder with trained keys and values before its own."""

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        cross: bool,
        prompt: KeyValuePrefix,
    ):
        super().__init__(key, config, cross=cross)
        self.prompt = prompt

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """The text, at positions behind the prefix."""
        return super().text_stream(text, rows, key).shift_positions(self.prompt.length)
