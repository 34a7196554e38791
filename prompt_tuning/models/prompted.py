"""The frozen models with a prompt among their input.

Two ways of running give the same numbers. *Shared*: the prompt is a stream of its own,
`[1, P, D]`, computed once for the batch, and every row of text attends to it; right
where no prompt vector sees text and the prompt stands first. *Joined*: the prompt is
put into every row, `[B, P + T, D]`; right everywhere.
"""

import dataclasses
import functools
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning import masks
from prompt_tuning.errors import InputError
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.decoder_only import Decoder, DecoderOnly, causal_stream
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.t5 import Encoder, EncoderDecoder, encoder_stream
from prompt_tuning.models.transformer import Stream
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
        """Vectors `P`."""
        ...

    def __call__(self) -> Float[Array, "P D"]:
        """The vectors, unbatched."""
        ...


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How a prompt stands among the text.

    Attributes:
      placement: where in the row: "prefix", "after_bos", "suffix" (in an encoder's row
        before its EOS) or "suffix_after_eos".
      prefix_attention: in a decoder-only model, whether the prompt and the row's given
        tokens see each other both ways, as in a prefix language model.
      execution: "shared" or "joined"; "auto" is shared wherever that is right.
    """

    placement: str = "prefix"
    prefix_attention: bool = False
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
        possible = (
            architecture == "decoder_only"
            and self.placement == "prefix"
            and not self.prefix_attention
        )
        if self.execution == "shared" and not possible:
            raise InputError(
                "execution is 'shared', but the prompt sees text or does not stand "
                "first here; use 'auto' or 'joined'"
            )
        return possible and self.execution != "joined"

    def join(
        self,
        prompt: Float[Array, "P D"],
        text: Float[Array, "B T D"],
        lengths: Int[Array, "B"],
        ends_with_eos: bool,
    ) -> Float[Array, "B S D"]:
        """The prompt put into every row where the placement says."""
        if self.placement == "prefix":
            return put_first(prompt, text)
        return join(prompt, text, self.place(lengths, ends_with_eos))

    def place(self, lengths: Int[Array, "B"], ends_with_eos: bool) -> Int[Array, "B"]:
        """How many tokens of each row stand before the prompt; see `Placement`."""
        return PLACEMENTS[self.placement](lengths, ends_with_eos)


def shared_streams(
    prompt: Float[Array, "P D"],
    text: Float[Array, "B T D"],
    lengths: Int[Array, "B"],
) -> tuple[Stream, Stream]:
    """The prompt as a stream of one row, and the text after it."""
    count = prompt.shape[0]
    first = causal_stream(prompt.astype(text.dtype)[None], jnp.array([count]))
    text_stream = causal_stream(text, lengths, first=count)
    return (
        dataclasses.replace(first, later_mask=None),
        dataclasses.replace(text_stream, masks=(None, *text_stream.masks)),
    )


class PromptEncoder(Encoder):
    """An encoder with a prompt among its input, before dropout.

    Attributes:
      prompt: the prompt module.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        prompt: Prompt,
        prompting: Prompting,
    ):
        super().__init__(key, config)
        self.prompt, self.prompting = prompt, prompting
        self.prompt_length = prompt.length

    def stream(self, text: Float[Array, "B T D"], lengths: Int[Array, "B"]) -> Stream:
        """Prompt and text joined; all see each other."""
        joined = self.prompting.join(self.prompt(), text, lengths, ends_with_eos=True)
        return encoder_stream(joined, lengths + self.prompt_length)


class PromptDecoder(Decoder):
    """A decoder with a prompt among its input.

    Attributes:
      prompt: the prompt module.
    """

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
        self.prompt, self.prompting = prompt, prompting
        self.prompt_length = prompt.length
        self.shared = prompting.shared(config.architecture)

    def streams(
        self,
        text: Float[Array, "B T D"],
        lengths: Int[Array, "B"],
        prefix_lengths: Int[Array, "B"],
    ) -> tuple[Stream, ...]:
        """Prompt and text, as two streams or joined to one."""
        prompt = self.prompt()
        if self.shared:
            return shared_streams(prompt, text, lengths)
        joined = self.prompting.join(prompt, text, prefix_lengths, ends_with_eos=False)
        stream = causal_stream(joined, lengths + self.prompt_length)
        if not self.prompting.prefix_attention:
            return (stream,)
        seen = masks.decoder_prefix_mask(
            prefix_lengths + self.prompt_length, stream.hidden.shape[1]
        )
        return (dataclasses.replace(stream, masks=(seen,)),)


class PromptEncoderDecoder(EncoderDecoder):
    """An encoder-decoder whose decoder sees the encoder's prompt."""

    def encoder_decoder_mask(
        self, lengths: Int[Array, "B"], length: int
    ) -> Bool[Array, "B 1 1 S"]:
        """What the decoder sees of encoder rows of `length` tokens and a prompt."""
        count = self.encoder.prompt_length
        return masks.encoder_decoder_mask(lengths + count, length + count)


class PromptDecoderOnly(DecoderOnly):
    """A decoder-only model in which a prompt vector may predict a token."""

    def predicting(
        self,
        hidden: tuple[Float[Array, "_ _ D"], ...],
        positions: Int[Array, "B m"],
        prefix_lengths: Int[Array, "B"],
    ) -> Float[Array, "B m D"]:
        """Token `i` is predicted by what stands before it: a token or the prompt."""
        decoder = self.decoder
        assert isinstance(decoder, PromptDecoder)
        if len(hidden) == 2:
            prompt, text = hidden
            from_text = super().predicting((text,), positions, prefix_lengths)
            return jnp.where(positions[..., None] == 0, prompt[:, -1:], from_text)
        at = decoder.prompting.place(prefix_lengths, ends_with_eos=False)
        joined = joined_position(positions, at, decoder.prompt_length)
        return super().predicting(hidden, joined, prefix_lengths)


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
