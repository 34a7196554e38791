"""The frozen models with a prompt among their input.

Two ways of running give the same numbers. *Shared*: the prompt is a stream of its own,
`[N, P, D]` for `N` prompts, run once ahead of the text, and every row of text attends
to it; right where no prompt vector sees text and the prompt stands first. *Joined*: the
prompt is put into every row, `[B, P + T, D]`; right everywhere.
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.errors import InputError
from prompt_tuning.models.attention import check_groups
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.decoder_only import (
    Decoder,
    DecoderOnly,
    Rows,
    causal_stream,
    places_in_segment,
)
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.streams import Mask, Stream
from prompt_tuning.models.t5 import Encoder, EncoderDecoder, encoder_stream
from prompt_tuning.prompts.placement import (
    PLACEMENTS,
    join,
    joined_position,
    put_first,
)


@runtime_checkable
class Prompt(Protocol):
    """What a prompted model needs of a prompt module."""

    @property
    def length(self) -> int:
        """Vectors `P`, padding among them."""
        ...

    @property
    def real_length(self) -> masks.Count:
        """How many of them are no padding."""
        ...

    def __call__(self) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """The vectors of one prompt, or of `N`."""
        ...


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How a prompt stands among the text.

    Attributes:
      placement: where in the row: "prefix", "after_bos", "suffix" (in an encoder's row
        before its EOS) or "suffix_after_eos".
      prefix_attention: in a decoder-only model, whether the prompt and the row's given
        tokens see each other both ways, as in a prefix language model.
      isolated: in an encoder, whether the prompt sees itself alone, so that it can run
        once for the batch; the text sees it either way.
      execution: "shared" or "joined"; "auto" is shared wherever that is right.
    """

    placement: str = "prefix"
    prefix_attention: bool = False
    isolated: bool = False
    execution: str = "auto"

    def __post_init__(self):
        if self.placement not in PLACEMENTS:
            raise InputError(
                f"placement is {self.placement!r}, expected one of "
                f"{', '.join(PLACEMENTS)}"
            )
        if self.execution not in ("auto", "shared", "joined"):
            raise InputError(
                f"execution is {self.execution!r}, expected auto, shared or joined"
            )

    def shared(self, architecture: str) -> bool:
        """Whether the prompt runs once for the batch.

        Raises:
          InputError: if "shared" was asked for where it would give other numbers.
        """
        sees_itself_alone = (
            not self.prefix_attention
            if architecture == "decoder_only"
            else self.isolated
        )
        possible = self.placement == "prefix" and sees_itself_alone
        if self.execution == "shared" and not possible:
            raise InputError(
                "execution is 'shared', but the prompt sees text or does not stand "
                "first here; use 'auto' or 'joined'"
            )
        return possible and self.execution != "joined"

    def place(self, lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
        """How many tokens of each row stand before the prompt; see `Placement`."""
        return PLACEMENTS[self.placement](lengths, ends_with_eos)


class _Prompted:
    """What a prompted encoder and a prompted decoder have in common.

    Attributes:
      prompt: the prompt module.
      prompting: how it stands among the text.
      shared: whether the prompt runs once, ahead of the text.
    """

    config: ModelConfig

    def _add_prompt(self, prompt: Prompt, prompting: Prompting) -> None:
        self.prompt, self.prompting = prompt, prompting
        self.shared = prompting.shared(self.config.architecture)

    def prompts(self) -> Float[Array, "N P D"]:
        """The vectors of all prompts."""
        vectors = self.prompt()
        return vectors if vectors.ndim == 3 else vectors[None]

    def prompt_count(self) -> masks.Count:
        """Vectors that stand among each row's text, padding not counted."""
        return self.prompt.real_length

    def seen_of_prompt(self) -> Mask:
        """What text sees of the prompt's vectors: all that are no padding."""
        if isinstance(self.prompt.real_length, int):
            return None
        place = jnp.arange(self.prompt.length)
        return (place < self.prompt.real_length)[None, None, None]

    def join(
        self,
        text: Float[Array, "B T D"],
        at: Int[Array, "B"],
        prompt_ids: Int[Array, "B"] | None,
    ) -> Float[Array, "B S D"]:
        """The prompt put into every row, after its first `at[b]` tokens."""
        prompt = rows_of(self.prompts(), len(text), prompt_ids)
        if self.prompting.placement == "prefix" and isinstance(
            self.prompt.real_length, int
        ):
            return put_first(prompt, text)
        return join(prompt, text, at, self.prompt.real_length)


def rows_of(
    stacked: Float[Array, "N *rest"], rows: int, prompt_ids: Int[Array, "B"] | None
) -> Float[Array, "_ *rest"]:
    """What each of `rows` rows has of `N` things; one for all if `N` is 1."""
    if len(stacked) == 1:
        return stacked
    if prompt_ids is not None:
        return stacked[prompt_ids]
    check_groups(rows, len(stacked))
    return jnp.repeat(stacked, rows // len(stacked), axis=0)


class PromptEncoder(_Prompted, Encoder):
    """An encoder with a prompt among its input, before dropout."""

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        prompt: Prompt,
        prompting: Prompting,
    ):
        super().__init__(key, config)
        self._add_prompt(prompt, prompting)

    def prefix_stream(self) -> Stream | None:
        """The prompts, where they see themselves alone and stand first."""
        if not self.shared:
            return None
        stream = encoder_stream(self.prompts(), jnp.atleast_1d(self.prompt.real_length))
        return dataclasses.replace(stream, later_mask=self.seen_of_prompt())

    def text_stream(
        self,
        text: Float[Array, "B T D"],
        lengths: Int[Array, "B"],
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> Stream:
        """The text behind the prompt, or prompt and text joined."""
        count = self.prompt.real_length
        if self.shared:
            return encoder_stream(text, lengths, count)
        at = self.prompting.place(lengths, ends_with_eos=True)
        joined = self.join(text, at, prompt_ids)
        stream = encoder_stream(joined, lengths + count)
        if not self.prompting.isolated:
            return stream
        mask = masks.prompt_isolated_mask(lengths + count, at, count, joined.shape[1])
        return dataclasses.replace(stream, mask=mask)


class PromptDecoder(_Prompted, Decoder):
    """A decoder with a prompt among its input."""

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        cross: bool,
        prompt: Prompt,
        prompting: Prompting,
    ):
        super().__init__(key, config, cross=cross)
        self._add_prompt(prompt, prompting)

    def prefix_stream(self) -> Stream | None:
        """The prompts, where they see no text and stand first."""
        if not self.shared:
            return None
        stream = causal_stream(self.prompts())
        return dataclasses.replace(stream, later_mask=self.seen_of_prompt())

    def last(self, hidden: Float[Array, "N P D"]) -> Float[Array, "N D"]:
        """The hidden state of each prompt's last vector that is no padding."""
        return hidden[:, self.prompt.real_length - 1]

    def text_stream(self, text: Float[Array, "B T D"], rows: Rows) -> Stream:
        """The text behind the prompt, or prompt and text joined."""
        count = self.prompt.real_length
        if self.shared:
            stream = causal_stream(text, rows.segment_ids, count)
            seen = masks.encoder_mask(rows.lengths, text.shape[1])
            return dataclasses.replace(stream, later_mask=seen)
        if rows.segment_ids is not None:
            raise ValueError(
                "packed rows need a prompt that runs ahead of the text; this one is "
                "joined to each row"
            )
        at = self.prompting.place(rows.prefix_lengths, ends_with_eos=False)
        stream = causal_stream(self.join(text, at, rows.prompt_ids))
        length, mask = stream.hidden.shape[1], stream.mask
        if self.prompting.prefix_attention:
            mask = masks.decoder_prefix_mask(rows.prefix_lengths + count, length)
        seen = masks.encoder_mask(rows.lengths + count, length)
        return dataclasses.replace(stream, mask=mask, later_mask=seen)


class PromptEncoderDecoder(EncoderDecoder):
    """An encoder-decoder whose decoder sees the encoder's prompt."""


class PromptDecoderOnly(DecoderOnly):
    """A decoder-only model in which a prompt vector may predict a token."""

    def predicting(
        self,
        text: Float[Array, "B S D"],
        positions: Int[Array, "B m"],
        rows: Rows,
        last: Float[Array, "N D"] | None,
    ) -> Float[Array, "B m D"]:
        """Token `i` is predicted by what stands before it: a token or the prompt."""
        decoder = self.decoder
        assert isinstance(decoder, PromptDecoder)
        if last is None:
            at = decoder.prompting.place(rows.prefix_lengths, ends_with_eos=False)
            joined = joined_position(positions, at, decoder.prompt.real_length)
            return super().predicting(text, joined, rows, None)
        from_text = super().predicting(text, positions, rows, None)
        place = positions
        if rows.segment_ids is not None:
            places = places_in_segment(rows.segment_ids)
            place = jnp.take_along_axis(places, positions, axis=1)
        last = rows_of(last, len(text), rows.prompt_ids)
        return jnp.where(place[..., None] == 0, last[:, None], from_text)


def build_model(
    key: Key[Array, ""],
    config: ModelConfig,
    prompt: Prompt | None = None,
    prompting: Prompting | None = None,
) -> LanguageModel:
    """A model of the config's family, with its parameters initialised.

    Args:
      key: of the frozen parameters; the prompt brings its own vectors.
      config: the frozen model.
      prompt: the prompt module; None for the model alone.
      prompting: how the prompt stands among the text; as a prefix if None.
    """
    prompting = prompting or Prompting()
    if config.architecture == "decoder_only":
        if prompting.isolated:
            raise InputError(
                "isolated is for encoders: in a decoder a prompt that stands first "
                "sees no text anyway"
            )
        if prompt is None:
            return DecoderOnly(key, config)
        decoder = functools.partial(PromptDecoder, prompt=prompt, prompting=prompting)
        return PromptDecoderOnly(key, config, decoder=decoder)
    if prompting.prefix_attention:
        raise InputError(
            "prefix_attention is for decoder-only models: an encoder's tokens see each "
            "other anyway"
        )
    prompting.shared(config.architecture)  # refuses what cannot be
    if prompt is None:
        return EncoderDecoder(key, config)
    encoder = functools.partial(PromptEncoder, prompt=prompt, prompting=prompting)
    return PromptEncoderDecoder(key, config, encoder=encoder)
