"""Models with prompts in their input, and the attention masks for them.

Prompts run in one of two ways, with the same results. *Shared*: the prompt is a
separate stream, `[N, P, D]` for `N` prompts, that runs once before the text, and every
row of text attends to it. This works if the prompt comes first and no prompt vector
sees text. *Joined*: the prompt is inserted into every row, `[B, P + T, D]`. This always
works.

`PromptEncoder` and `PromptDecoder` build the masks and positions for both.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.errors import InputError, kind_of
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import optional_key
from prompt_tuning.models import decoder_only, layer_inputs
from prompt_tuning.models.decoder_only import Decoder
from prompt_tuning.models.encoder_decoder import Encoder, encoder_stream
from prompt_tuning.models.prompt_vectors import select_vectors, vectors_of_texts
from prompt_tuning.models.row_info import RowInfo, check_groupable, positions_in_segment
from prompt_tuning.models.streams import BlockInput, Mask, Stream
from prompt_tuning.models.transformer import Stack
from prompt_tuning.prompts import placement
from prompt_tuning.prompts.placement import JoinedLayout
from prompt_tuning.prompts.prompt_module import (
    Attachment,
    InputDependentPrompt,
    InputPrompt,
)
from prompt_tuning.settings.prompting import Prompting


class _Prompted(Stack):
    """Base class of encoders and decoders with a prompt in their input.

    Attributes:
      prompt: the prompt module.
      prompting: position and visibility of the prompt.
      shared: whether the prompt runs once, before the text.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        prompt: InputPrompt,
        prompting: Prompting,
        **stack: Any,
    ):
        super().__init__(key, config, **stack)
        prompting.check_windows(self.windowed_layers)
        if isinstance(prompt, InputDependentPrompt):
            prompting = prompting.joined_by_row("the prompt depends on each row's text")
        if self.config.positions == "disentangled":
            prompting = prompting.joined_by_row("queries see distances in their rows")
        self.prompt, self.prompting = prompt, prompting
        self.shared = prompting.shared(causal=not self.bidirectional)

    def prompts(self, key: Key[Array, ""] | None) -> Float[Array, "N P D"]:
        """Returns the vectors of all prompts."""
        vectors = self.prompt(optional_key(key, "prompt"))
        return vectors if vectors.ndim == 3 else vectors[None]

    def prompt_count(self) -> masks.Count:
        """Number of vectors added to each example's text, without padding."""
        in_text = self.prompting.placement == placement.TEMPLATE
        return 0 if in_text else self.prompt.real_length

    def visible_to(self, stream: Stream, rows: RowInfo) -> Stream:
        """Returns the stream of prompts as rows of text see it."""
        mask = _real_mask(self.prompt.length, self.prompt.real_length)
        return assign_prompts(stream, rows, mask)

    def insertion_points(self, rows: RowInfo, text_length: int) -> Int[Array, "B n"]:
        """Returns how many tokens of the row precede each example's prompt."""
        inputs = lengths = rows.example_lengths(text_length)
        if self.stack == "decoder":
            inputs = rows.prefix_lengths.reshape(lengths.shape)
        starts = jnp.cumsum(lengths, axis=1) - lengths
        ends_with_eos = self.bidirectional and self.config.encoder_input != "bos_text"
        points = starts + placement.PLACEMENTS[self.prompting.placement](
            inputs, ends_with_eos
        )
        # An empty row still has one prompt.
        present = (lengths > 0) | (jnp.arange(rows.examples) == 0)
        return jnp.where(present, points, text_length)

    def layout(self, rows: RowInfo, text_length: int) -> JoinedLayout:
        """Returns the layout of the joined rows."""
        segments, length = rows.segments(text_length), self.prompt.length
        if self.prompting.placement == placement.TEMPLATE:
            assert rows.vector_ids is not None  # rows of inputs always have them
            return placement.lay_out_template(
                rows.vector_ids, segments, length, rows.examples
            )
        points = self.insertion_points(rows, text_length)
        return placement.lay_out(points, segments, self.prompt.real_length, length)

    def join(
        self, text: Float[Array, "B T D"], rows: RowInfo, key: Key[Array, ""] | None
    ) -> Float[Array, "B S D"]:
        """Inserts the prompts into every row."""
        vectors = layer_inputs.pad_width(self._vectors(text, rows, key), text.shape[-1])
        first = self.prompting.placement == "prefix" and not rows.packed
        if first and isinstance(self.prompt.real_length, int):
            return placement.put_first(vectors, text)
        return placement.join(vectors, text, self.layout(rows, text.shape[1]))

    def _vectors(self, text, rows: RowInfo, key) -> Float[Array, "_ nP D"]:
        if not isinstance(self.prompt, InputDependentPrompt):
            return select_vectors(self.prompts(key), len(text), rows)
        readable = rows.is_input(text.shape[1])
        if self.stack == "encoder":
            readable = rows.segments(text.shape[1]) > 0
        size, key = self.config.vocabulary_size, optional_key(key, "prompt")
        embedded = text[..., : self.config.width]  # without the inputs of layers
        return vectors_of_texts(self.prompt, embedded, readable, rows, size, key)

    def block_input(self, rows: RowInfo | None, text_length: int) -> BlockInput | None:
        """Returns the prompt's change to each block's input; None if it has none.

        `rows` is None if the prompt runs alone instead of being joined to them.
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


def _real_mask(length: int, count: masks.Count) -> Bool[Array, "P"] | None:
    """Mask of the vectors that are not padding; None if there is no padding."""
    return None if isinstance(count, int) else jnp.arange(length) < count


def assign_prompts(
    stream: Stream, rows: RowInfo, real: Bool[Array, "P"] | None
) -> Stream:
    """Lets each row of text, and each example of a packed row, see its own prompt.

    `stream` has `N` prompts; `real` masks their padding, None if there is none.
    """
    # All rows share a single prompt; the ids then choose among the other stack's.
    ids = rows.prompt_ids if len(stream.hidden) > 1 else None
    mask = None
    if real is not None:
        mask = real[None, None, None]
    if ids is None and len(stream.hidden) > 1:
        check_groupable(len(rows.lengths), len(stream.hidden))
    if ids is None or ids.ndim == 1:
        return dataclasses.replace(stream, context_rows=ids, context_mask=mask)
    assert rows.segment_ids is not None  # only packed rows choose prompts by example
    examples, length = ids.shape[1], stream.positions.shape[1]
    owner = jnp.repeat(jnp.arange(1, examples + 1), length)  # [n * P]
    mask = _example_mask(rows.segment_ids, owner, mask, examples)
    positions = jnp.tile(stream.positions, (1, examples))
    return dataclasses.replace(
        stream, context_rows=ids, context_mask=mask, context_positions=positions
    )


def _example_mask(
    segment_ids: Int[Array, "B T"], owner: Int[Array, "nP"], mask: Mask, examples: int
) -> Mask:
    """Mask that shows each example of a packed row only its own prompt."""
    same = (segment_ids[..., None] == owner)[:, None]  # [B, 1, T, n * P]
    return same if mask is None else same & jnp.tile(mask, (1, 1, 1, examples))


class PromptEncoder(_Prompted, Encoder):
    """An encoder with a prompt in its input.

    The prompt is inserted before the input's dropout. Since text sees the whole row in
    an encoder, it always sees the prompt; `Prompting.visibility` decides what the
    prompt sees. Each packed example has its own copy.
    """

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """Returns the stream of shared prompts; None if they are joined."""
        if not self.shared:
            return None
        prompts = self.prompts(key)
        real = jnp.atleast_1d(self.prompt.real_length)
        stream = encoder_stream(prompts, real)
        mask = masks.encoder_mask(real, self.prompt.length)
        mask &= prompt_mask(self.prompt.length, self.prompting)
        return dataclasses.replace(
            stream,
            mask=mask,
            block_input=self.block_input(None, 0),
            shared=True,
            beyond_window=self.prompting.beyond_window,
        )

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the text after the prompt, or prompt and text joined."""
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
            positions_in_segment(layout.segments),
            mask,
            context_mask=(layout.segments > 0)[:, None, None],
            segments=layout.segments if rows.packed else None,
            block_input=block_input,
        )


def prompt_mask(length: int, prompting: Prompting) -> Bool[Array, "1 1 P P"]:
    """Mask of what the vectors of a prompt that runs alone see of each other."""
    return masks.region_mask(jnp.ones((1, length), bool), prompting.sees)


class PromptDecoder(_Prompted, Decoder):
    """A decoder with a prompt in its input.

    It moves the text after the prompt's positions. With `Prompting.prefix_attention`
    the prompt and the input tokens see each other in both directions, while the
    completion stays causal. In packed rows each example has its own copy of the prompt.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        cross: bool,
        prompt: InputPrompt,
        prompting: Prompting,
    ):
        if cross and isinstance(prompt, InputDependentPrompt):
            raise InputError(
                f"the decoder's prompt is {kind_of(prompt)}, but a decoder after an "
                "encoder is given no text to depend on; use it as the encoder's prompt"
            )
        if cross:
            # The prompt attends to the encoder's outputs, which differ by row.
            prompting = dataclasses.replace(prompting, execution="joined")
        super().__init__(key, config, cross=cross, prompt=prompt, prompting=prompting)

    def prefix_stream(self, key: Key[Array, ""] | None = None) -> Stream | None:
        """Returns the stream of shared prompts; None if they are joined."""
        if not self.shared:
            return None
        stream = decoder_only.causal_stream(self.prompts(key))
        real = jnp.atleast_1d(self.prompt.real_length)
        stream = dataclasses.replace(stream, lengths=real)
        if self.prompting.prefix_attention:
            mask = prompt_mask(self.prompt.length, self.prompting)
            real = _real_mask(self.prompt.length, self.prompt.real_length)
            mask = mask if real is None else mask & real
            stream = dataclasses.replace(stream, mask=mask)
        return dataclasses.replace(
            stream,
            block_input=self.block_input(None, 0),
            shared=True,
            beyond_window=self.prompting.beyond_window,
        )

    def last_hidden(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """Returns the hidden state of each prompt's last vector before padding."""
        return hidden[:, self.prompt.real_length - 1]

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        rows: RowInfo,
        key: Key[Array, ""] | None = None,
    ) -> Stream:
        """Returns the text after the prompt, or prompt and text joined."""
        if self.shared:
            return self._text_after_prompt(text, rows)
        joined = self.join(text, rows, key)
        stream = self._joined_stream(joined, rows, text.shape[1])
        lengths = rows.lengths + self.prompt_count()
        return dataclasses.replace(
            stream,
            context_mask=masks.encoder_mask(lengths, joined.shape[1]),
            # Packed examples have a prompt each, and segments mark their padding.
            lengths=None if rows.packed else lengths,
            block_input=self.block_input(rows, text.shape[1]),
        )

    def _text_after_prompt(self, text: Float[Array, "B T D"], rows: RowInfo) -> Stream:
        stream = super().text_stream(text, rows)
        stream = stream.shift_positions(self.prompt.real_length)
        if not self.prompting.prefix_attention:
            return stream
        sees = self.prompting.sees
        return dataclasses.replace(
            stream, mask=decoder_only.input_mask(rows, text.shape[1], sees)
        )

    def _joined_stream(
        self, joined: Float[Array, "B S D"], rows: RowInfo, text_length: int
    ) -> Stream:
        if not rows.packed and not self.prompting.prefix_attention:
            return decoder_only.causal_stream(joined)
        layout = self.layout(rows, text_length)
        segments = layout.segments if rows.packed else None
        stream = decoder_only.causal_stream(joined, segments)
        if self.prompting.prefix_attention:
            inputs = layout.of_text(
                rows.is_input(text_length), rows.examples * self.prompt.length
            )
            mask = masks.decoder_region_mask(
                inputs | layout.is_prompt, layout.is_prompt, self.prompting.sees
            )
            mask &= masks.segment_mask(layout.segments, layout.segments)
            stream = dataclasses.replace(stream, mask=mask)
        return stream

    def stream_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Maps token positions to positions in the text's stream."""
        if self.shared or self.prompting.placement == placement.TEMPLATE:
            return positions
        points = self.insertion_points(rows, text_length)
        return placement.joined_position(positions, points, self.prompt.real_length)

    def end_positions(
        self, positions: Int[Array, "B m"], rows: RowInfo, text_length: int
    ) -> Int[Array, "B m"]:
        """Maps last tokens to ends of examples, which may be a prompt's last vector."""
        ends = self.stream_positions(positions, rows, text_length)
        if self.shared or self.prompting.placement == placement.TEMPLATE:
            return ends
        points = rows.of_examples(self.insertion_points(rows, text_length), positions)
        return ends + jnp.where(points == positions + 1, self.prompt.real_length, 0)
