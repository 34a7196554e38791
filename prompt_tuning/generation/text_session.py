"""Sessions that a model answers texts in: each by itself, or as a conversation."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.decoding.row_encoding import encode_given
from prompt_tuning.generation.conversation import ChatEncoder, Conversation, first_turn
from prompt_tuning.pretrained.prompted_model import PromptedModel


@runtime_checkable
class RowStream(Protocol):
    """Continues rows of token ids; see `Generator`."""

    @property
    def model(self) -> PromptedModel:
        """Model that generates."""
        ...

    def stream(self, row: Sequence[int], prompt_id: int | None = None) -> Iterator[str]:
        """Yields the text that continues a row, piece by piece."""
        ...


class TextSession:
    """Continues texts, each by itself.

    Args:
      generator: generates tokens.
      template: template of the run's data, whose only key each text replaces.
      prompt_id: prompt of all texts if the model has several, else None.
    """

    hint = "Type a text for the model to continue. Ctrl-D ends."

    def __init__(
        self,
        generator: RowStream,
        template: TokenTemplate | None = None,
        prompt_id: int | None = None,
    ):
        self.generator = generator
        self._template, self._prompt_id = template, prompt_id

    def encode(self, text: str) -> list[int]:
        """Returns the ids that are continued for a text alone."""
        return encode_given(self.generator.model, text, self._template)

    def opening(self, text: str) -> str:
        """Returns what a terminal shows of a text before its continuation."""
        separate = self.generator.model.config.architecture == "encoder_decoder"
        return f"{text} -> " if separate else text

    def answer(self, text: str) -> Iterator[str]:
        """Yields the continuation of a text, piece by piece."""
        return self.generator.stream(self.encode(text), self._prompt_id)

    def reset(self) -> None:
        """Does nothing: texts do not depend on each other."""


class ChatSession(TextSession):
    """Answers messages through a chat template; `answer` remembers the conversation.

    Args:
      generator: generates tokens.
      encoder: encodes conversations.
      system: system message, or None.
      prompt_id: prompt of all texts if the model has several, else None.
    """

    hint = "Type a message. /reset starts a new conversation, Ctrl-D ends."

    def __init__(
        self,
        generator: RowStream,
        encoder: ChatEncoder,
        system: str | None = None,
        prompt_id: int | None = None,
    ):
        super().__init__(generator, None, prompt_id)
        self._conversation = Conversation(encoder, system)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a conversation that begins with a text."""
        messages = first_turn(text, self._conversation.system)
        return self._conversation.encoder(answers_of(messages), "the message")

    def opening(self, text: str) -> str:
        """Returns nothing: answers are shown alone."""
        del text
        return ""

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to a message that follows those before, piece by piece."""
        return self._conversation.answer(
            text, lambda ids: self.generator.stream(ids, self._prompt_id)
        )

    def reset(self) -> None:
        """Forgets the conversation."""
        self._conversation.reset()
