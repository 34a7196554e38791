"""Models with trained keys and values before every row, in every block.

The masks of the plain models stay: a prefix is one more context, which every query
sees.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from prompt_tuning.core import masks
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import check_all_attention
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.block import local_heads
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.encoder_decoder import Encoder
from prompt_tuning.models.recurrent_state import RecurrentState
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.models.streams import Context, Stream
from prompt_tuning.models.transformer import Stack
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.state_prefix import StatePrefix
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.sharding import collectives


class _Prefixed(Stack):
    """Base class of encoders and decoders with a prefix, `prompt`.

    Raises:
      InputError: if `prompting` has settings for prompts at the input, which would do
        nothing here.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        prompt: KeyValuePrefix,
        prompting: Prompting,
        **stack: Any,
    ):
        super().__init__(key, config, **stack)
        if prompting != Prompting(beyond_window=prompting.beyond_window):
            raise InputError(
                "a key/value prefix always precedes the text and sees none of it, so "
                f"it does not support {prompting}; leave Prompting at its defaults"
            )
        has_keys = self.config.recurrence_beside_attention  # in every layer
        if not (has_keys or isinstance(prompt, StatePrefix)):
            check_all_attention(
                self.config,
                "the prompt is a key/value prefix",
                "use StatePrefix, a soft prompt, LoRA or IA3",
            )
        prompting.check_windows(self.windowed_layers)
        self.prompt, self.beyond_window = prompt, prompting.beyond_window

    def prompt_count(self) -> masks.Count:
        """Number of positions of the prefix."""
        return self.prompt.length

    def prefix_contexts(self, rows: RowInfo) -> tuple[Context, ...]:
        """Returns the prefix as context that every position of every row sees."""
        del rows
        whole = collectives.copy_to_shards(
            self.prompt().astype(self.config.dtype), "heads"
        )
        # Each device of a mesh keeps the key/value heads that its queries read.
        shard = collectives.local_prefix_groups(whole)  # [L, 2, P, G, K]
        by_group = shard.transpose(1, 0, 3, 2, 4)[:, :, :, None]  # [2, L, G, 1, P, K]
        positions = None
        if not self.beyond_window:
            positions = jnp.arange(self.prompt.length)[None]
        state = None
        if isinstance(self.prompt, StatePrefix):
            window, memory = self.prompt.initial_state()
            state = local_heads(
                RecurrentState(window.astype(self.config.dtype), memory), self.config
            )
            # One row, which all rows continue.
            state = jax.tree.map(lambda x: x[:, None], state)
        return (Context(KeyValues(*by_group), None, None, positions, state),)


class PrefixEncoder(_Prefixed, Encoder):
    """An encoder with trained keys and values before its input."""

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the text, at positions after the prefix."""
        stream = super().text_stream(text, rows, key)
        positions = rows.positions_in_example(text.shape[1])
        stream = dataclasses.replace(stream, positions=positions)
        return stream.shift_positions(self.prompt.length)


class PrefixDecoder(_Prefixed, Decoder):
    """A decoder with trained keys and values before its input."""

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the text, at positions after the prefix."""
        return super().text_stream(text, rows, key).shift_positions(self.prompt.length)
