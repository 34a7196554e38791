"""A conversation with a model, in which each answer may use another adapter."""

import dataclasses
from collections.abc import Iterator, Mapping

from prompt_tuning.core.adapter_names import BASE, TRAINED, shown_name
from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_stream import stream_request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.conversation import ChatEncoder, Conversation


class AdapterChat:
    """Answers messages through a chat template, and remembers the conversation.

    Args:
      engine: engine that generates.
      encoder: encodes conversations.
      sampling: how tokens are chosen.
      system: system message, or None.
      encoders: encoders of adapters by name; the others use `encoder`.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        encoder: ChatEncoder,
        sampling: Sampling,
        system: str | None = None,
        encoders: Mapping[str, ChatEncoder] | None = None,
    ):
        self._encoder, self._encoders = encoder, encoders or {}
        self._engine, self._sampling = engine, sampling
        self._conversation = Conversation(encoder, system)
        self._adapters = {BASE: None} | {
            shown_name(name): name for name in engine.adapters
        }
        self.adapter = TRAINED if TRAINED in self._adapters else BASE
        self.hint = (
            f"Type a message for {self.adapter}. /adapter NAME answers with another of "
            f"{', '.join(self._adapters)}; /reset starts a new conversation; Ctrl-C "
            "ends an answer, Ctrl-D the program."
        )

    def opening(self, text: str) -> str:
        """Returns nothing: answers are shown alone."""
        del text
        return ""

    def choose_adapter(self, name: str) -> str:
        """Answers with another adapter from now on; returns what to report.

        Raises:
          InputError: if there is none of this name.
        """
        if name not in self._adapters:
            raise InputError(
                f"no adapter is named {shown(name)}{did_you_mean(name, self._adapters)}"
            )
        self.adapter = name
        self._conversation.encoder = self._encoders.get(name, self._encoder)
        return f"answers come from {name} now"

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a message that follows those before, piece by piece.

        Raises:
          InputError: if the conversation is too long.
        """
        return self._conversation.answer(text, self._continue)

    def _continue(self, ids: list[int]) -> Iterator[str]:
        """Yields the text that continues ids, piece by piece."""
        own, ends = self._sampling.ends, self._conversation.encoder.turn_ends()
        request = Request(
            ids=ids,
            adapter=self._adapters[self.adapter],
            sampling=dataclasses.replace(self._sampling, ends=(*own, *ends)),
        )
        return (piece.text for piece in stream_request(self._engine, request))

    def reset(self) -> None:
        """Forgets the conversation."""
        self._conversation.reset()
