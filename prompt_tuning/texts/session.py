"""An interactive session: single texts, or a conversation."""

import dataclasses
from collections.abc import Iterator

from prompt_tuning.core.adapter_names import BASE, TRAINED
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.chat_encoder import first_turn
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.message_forms import Message
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.texts.text_settings import TextSettings
from prompt_tuning.texts.texts import Texts


class Session:
    """Answers texts; in a conversation, each answer sees the earlier ones."""

    def __init__(self, texts: Texts, settings: TextSettings):
        if settings.adapter is None:
            name = TRAINED if TRAINED in texts.names else BASE
            settings = dataclasses.replace(settings, adapter=name)
        self._texts, self._settings = texts, settings
        self._messages: list[Message] = []
        if settings.chat:
            # A missing chat template is reported before the first message.
            texts.find(settings.adapter).encoding.chat.turn_ends()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters to choose from."""
        return self._texts.names

    @property
    def hint(self) -> str:
        """Returns the text that a terminal shows first."""
        if not self._settings.chat:
            return "Type a text for the model to continue. Ctrl-D ends."
        if len(self.names) == 1:
            return "Type a message. /reset starts a new conversation, Ctrl-D ends."
        return (
            f"Type a message for {self._settings.adapter}. /adapter NAME answers with "
            f"another of {', '.join(self.names)}; /reset starts a new conversation; "
            "Ctrl-C ends an answer, Ctrl-D the program."
        )

    def opening(self, text: str) -> str:
        """Returns the part of a text that a terminal shows before its continuation."""
        return opening(text, self._texts.model, chat=self._settings.chat)

    def choose_adapter(self, name: str) -> str:
        """Switches to another adapter; returns a message about it."""
        self._texts.find(name)
        self._settings = dataclasses.replace(self._settings, adapter=name)
        return f"answers come from {name} now"

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a text, piece by piece.

        Raises:
          InputError: if the text or the conversation cannot be continued.
        """
        texts, settings = self._texts, self._settings
        if not settings.chat:
            yield from texts.stream(texts.request(text, settings))
            return
        messages = [*self._messages, {"role": "user", "content": text}]
        if not self._messages:
            messages = first_turn(text, settings.system)
        answer = ""
        try:
            request = texts.request(answers_of(messages), settings)
            for piece in texts.stream(request):
                answer += piece
                # Keep the shown part of an interrupted answer.
                self._messages = [*messages, {"role": "assistant", "content": answer}]
                yield piece
        except InputError as problem:
            hint = "; /reset starts a new conversation" if len(messages) > 2 else ""
            raise InputError(f"{problem}{hint}") from problem

    def reset(self) -> None:
        """Deletes all messages."""
        self._messages = []


def opening(text: str, model: PromptedModel, *, chat: bool) -> str:
    """Returns the part of a text that a terminal shows before its continuation.

    With `chat` that is nothing: only the answer is shown.
    """
    if chat:
        return ""
    separate = model.config.architecture == "encoder_decoder"
    return f"{text} -> " if separate else text
