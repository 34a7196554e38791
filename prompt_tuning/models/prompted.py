"""The frozen models with prompts among their input.

Two ways of running give the same numbers. *Shared*: the prompt is a stream of its own,
`[N, P, D]` for `N` prompts, run once ahead of the text, and every row of text attends
to it; right where no prompt vector sees text and the prompt stands first. *Joined*: the
prompt is put into every row, `[B, P + T, D]`; right everywhere.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.models.decoder_only import Decoder, DecoderOnly, causal_stream
from prompt_tuning.models.row_info import RowInfo, check_groupable, select_prompts
from prompt_tuning.models.streams import BlockInput, Mask, Stream
from prompt_tuning.models.t5 import Encoder, EncoderDecoder, encoder_stream
from prompt_tuning.prompts.placement import (
    TEMPLATE,
    JoinedLayout,
    join,
    joined_position,
    lay_out,
    lay_out_template,
    put_first,
)
from prompt_tuning.prompts.prompt_module import Attachment, InputPrompt
from prompt_tuning.prompts.prompt_settings import Prompting


class _Prompted:
    """What a prompted encoder and a prompted decoder have in common.

    Attributes:
      prompt: the prompt module.
      prompting: how it stands among the text.
      shared: whether the prompt runs once, ahead of the text.
    """

    config: ModelConfig
    ends_with_eos: bool

    def _add_prompt(self, prompt: InputPrompt, prompting: Prompting) -> None:
        self.prompt, self.prompting = prompt, prompting
        self.shared = prompting.shared(causal=not self.ends_with_eos)

    def prompts(self, key: Key[Array, ""] | None) -> Float[Array, "N P D"]:
        """The vectors of all prompts."""
        vectors = self.prompt(optional_key(key, "prompt"))
        return vectors if vectors.ndim == 3 else vectors[None]

    def prompt_count(self) -> masks.Count:
        """Vectors that stand among each example's text, padding not counted."""
        in_text = self.prompting.placement == TEMPLATE
        return 0 if in_text else self.prompt.real_length

    def visible_to(self, stream: Stream, rows: RowInfo) -> Stream:
        """The prompts' own stream as rows of text see it."""
        seen = _real(self.prompt.length, self.prompt.real_length)
        return ahead_of(stream, rows, seen)

    def at(self, rows: RowInfo, text_length: int) -> Int[Array, "B n"]:
        """How many tokens of each row stand before each example's prompt."""
        lengths = rows.example_lengths(text_length)
        given = lengths
        if not self.ends_with_eos:
            given = rows.prefix_lengths.reshape(lengths.shape)
        starts = jnp.cumsum(lengths, axis=1) - lengths
        at = starts + self.prompting.place(given, self.ends_with_eos)
        present = (lengths > 0) | (jnp.arange(rows.examples) == 0)
        return jnp.where(present, at, text_length)

    def layout(self, rows: RowInfo, text_length: int) -> JoinedLayout:
        """Where everything stands in the joined rows."""
        segments, length = rows.segments(text_length), self.prompt.length
        if self.prompting.placement == TEMPLATE:
            assert rows.vector_ids is not None  # of inputs always
            return lay_out_template(rows.vector_ids, segments, length, rows.examples)
        at = self.at(rows, text_length)
        return lay_out(at, segments, self.prompt.real_length, length)

    def join(
        self, text: Float[Array, "B T D"], rows: RowInfo, key: Key[Array, ""] | None
    ) -> Float[Array, "B S D"]:
        """The prompts put into every row."""
        vectors = vectors_of(self.prompts(key), len(text), rows)
        first = self.prompting.placement == "prefix" and not rows.packed
        if first and isinstance(self.prompt.real_length, int):
            return put_first(vectors, text)
        return join(vectors, text, self.layout(rows, text.shape[1]))

    def block_input(self, rows: RowInfo | None, text_length: int) -> BlockInput | None:
        """What a deep prompt does at each block.

        Args:
          rows: that the prompt was joined to; None where it runs alone.
          text_length: `T` of these rows.
        """
        prompt = self.prompt
        if prompt.attachment is not Attachment.EVERY_BLOCK:
            return None
        values = prompt.block_values()  # [L, P, W]
        later = jnp.arange(len(values)) > 0  # [L]: not the first block
        layout = None if rows is None else self.layout(rows, text_length)

        def apply(hidden: Array, block: tuple[Array, Array]) -> Array:
            values, later = block
            values, mask = values.astype(hidden.dtype)[None], later  # [1, P, W], []
            if layout is not None:
                values = values[0][layout.source % prompt.length]  # [B, S, W]
                mask = (layout.is_prompt & later)[..., None]  # [B, S, 1]
            return jnp.where(mask, prompt.enter_block(hidden, values), hidden)

        return BlockInput((values, later), apply)


def _real(length: int, count: masks.Count) -> Bool[Array, "P"] | None:
    """Which vectors are no padding; None for all."""
    return None if isinstance(count, int) else jnp.arange(length) < count


def ahead_of(stream: Stream, rows: RowInfo, real: Bool[Array, "P"] | None) -> Stream:
    """A stream of prompts as rows of text see it: each its own.

    Args:
      stream: of `N` prompts.
      rows: of text.
      real: which of a prompt's positions are no padding; None for all.
    """
    # One prompt is everyone's, whatever the ids say that choose another stack's.
    ids = rows.prompt_ids if len(stream.hidden) > 1 else None
    mask = None
    if real is not None:
        mask = real[None, None, None]
    if ids is None and len(stream.hidden) > 1:
        check_groupable(len(rows.lengths), len(stream.hidden))
    if ids is None or ids.ndim == 1:
        return dataclasses.replace(stream, context_rows=ids, context_mask=mask)
    assert rows.segment_ids is not None  # prompts by example are of packed rows
    examples, length = ids.shape[1], stream.positions.shape[1]
    owner = jnp.repeat(jnp.arange(1, examples + 1), length)
    mask = _of_examples(rows.segment_ids, owner, mask, examples)
    positions = jnp.tile(stream.positions, (1, examples))
    return dataclasses.replace(
        stream, context_rows=ids, context_mask=mask, context_positions=positions
    )


def _of_examples(
    segment_ids: Int[Array, "B T"], owner: Int[Array, "nP"], mask: Mask, examples: int
) -> Mask:
    """Each example of a packed row sees its own prompt of all those of the row."""
    own = (segment_ids[..., None] == owner)[:, None]
    return own if mask is None else own & jnp.tile(mask, (1, 1, 1, examples))


def vectors_of(
    prompts: Float[Array, "N P D"], count: int, rows: RowInfo
) -> Float[Array, "_ nP D"]:
    """The vectors of each row's prompts, one prompt after the other; or of all rows."""
    ids = rows.prompt_ids
    if ids is not None and ids.ndim == 2 and len(prompts) > 1:
        return prompts[ids].reshape(count, -1, prompts.shape[-1])
    own = prompts if len(prompts) == 1 else select_prompts(prompts, count, ids)
    return jnp.tile(own, (1, rows.examples, 1))


class PromptEncoder(_Prompted, Encoder):
    """An encoder with a prompt among its input, before dropout."""

    ends_with_eos = True

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        prompt: InputPrompt,
        prompting: Prompting,
    ):
        super().__init__(key, config)
        self._add_prompt(prompt, prompting)

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """The prompts, where they see no text and stand first."""
        if not self.shared:
            return None
        prompts = self.prompts(key)
        real = jnp.atleast_1d(self.prompt.real_length)
        stream = encoder_stream(prompts, real)
        mask = masks.encoder_mask(real, self.prompt.length)
        mask &= prompt_mask(self.prompt.length, self.prompting)
        return dataclasses.replace(
            stream, mask=mask, block_input=self.block_input(None, 0), shared=True
        )

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """The text behind the prompt, or prompt and text joined."""
        count = self.prompt.real_length
        if self.shared:
            stream = super().text_stream(text, rows)
            positions = rows.positions_in_example(text.shape[1]) + count
            return dataclasses.replace(stream, positions=positions)
        joined = self.join(text, rows, key)
        block_input = self.block_input(rows, text.shape[1])
        if not rows.packed and self.prompting.visibility is None:
            stream = encoder_stream(joined, rows.lengths + self.prompt_count())
            return dataclasses.replace(stream, block_input=block_input)
        layout = self.layout(rows, text.shape[1])
        mask = masks.segment_mask(layout.segments, layout.segments)
        mask &= masks.region_mask(layout.is_prompt, self.prompting.sees)
        return Stream(
            joined,
            jnp.arange(joined.shape[1])[None],
            mask,
            context_mask=(layout.segments > 0)[:, None, None],
            segments=layout.segments if rows.packed else None,
            block_input=block_input,
        )


def prompt_mask(length: int, prompting: Prompting) -> Bool[Array, "1 1 P P"]:
    """What the vectors of a prompt that runs alone see of each other."""
    return masks.region_mask(jnp.ones((1, length), bool), prompting.sees)


class PromptDecoder(_Prompted, Decoder):
    """A decoder with a prompt among its input."""

    ends_with_eos = False

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        cross: bool,
        prompt: InputPrompt,
        prompting: Prompting,
    ):
        super().__init__(key, config, cross=cross)
        if cross:
            # What it sees of the encoder differs by row, so that it runs in each.
            prompting = dataclasses.replace(prompting, execution="joined")
        self._add_prompt(prompt, prompting)

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """The prompts, where they see no text and stand first."""
        if not self.shared:
            return None
        stream = causal_stream(self.prompts(key))
        if self.prompting.prefix_attention:
            among = prompt_mask(self.prompt.length, self.prompting)
            real = _real(self.prompt.length, self.prompt.real_length)
            mask = among if real is None else among & real
            stream = dataclasses.replace(stream, mask=mask)
        block_input = self.block_input(None, 0)
        return dataclasses.replace(stream, block_input=block_input, shared=True)

    def last_hidden(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """The hidden state of each prompt's last vector that is no padding."""
        return hidden[:, self.prompt.real_length - 1]

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """The text behind the prompt, or prompt and text joined."""
        if self.shared:
            return self._text_behind(text, rows)
        joined = self.join(text, rows, key)
        stream = self._joined_stream(joined, rows, text.shape[1])
        seen = masks.encoder_mask(rows.lengths + self.prompt_count(), joined.shape[1])
        block_input = self.block_input(rows, text.shape[1])
        return dataclasses.replace(stream, context_mask=seen, block_input=block_input)

    def _text_behind(self, text: Float[Array, "B T D"], rows: RowInfo) -> Stream:
        stream = (
            super().text_stream(text, rows).shift_positions(self.prompt.real_length)
        )
        if not self.prompting.prefix_attention:
            return stream
        given = rows.is_given(text.shape[1])
        none = jnp.zeros_like(given)
        mask = masks.decoder_region_mask(given, none, self.prompting.sees)
        if rows.segment_ids is not None:
            mask &= masks.segment_mask(rows.segment_ids, rows.segment_ids)
        return dataclasses.replace(stream, mask=mask)

    def _joined_stream(
        self, joined: Float[Array, "B S D"], rows: RowInfo, text_length: int
    ) -> Stream:
        if not rows.packed and not self.prompting.prefix_attention:
            return causal_stream(joined)
        layout = self.layout(rows, text_length)
        segments = layout.segments if rows.packed else None
        stream = causal_stream(joined, segments)
        if self.prompting.prefix_attention:
            given = layout.of_text(
                rows.is_given(text_length), rows.examples * self.prompt.length
            )
            mask = masks.decoder_region_mask(
                given | layout.is_prompt, layout.is_prompt, self.prompting.sees
            )
            mask &= masks.segment_mask(layout.segments, layout.segments)
            stream = dataclasses.replace(stream, mask=mask)
        return stream

    def stream_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Where tokens stand in the stream of the text."""
        if self.shared or self.prompting.placement == TEMPLATE:
            return positions
        at = self.at(rows, text_length)
        return joined_position(positions, at, self.prompt.real_length)


class PromptDecoderOnly(DecoderOnly):
    """A decoder-only model with a prompt among its input."""


class PromptEncoderDecoder(EncoderDecoder):
    """An encoder-decoder whose encoder has a prompt, which its decoder sees."""


class PromptEncoderPromptDecoder(EncoderDecoder):
    """An encoder-decoder with a prompt in its encoder and one in its decoder."""
