"""Conversations as ids, up to the answer that comes next."""

from pathlib import Path

from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.text.chat_templates import ChatTemplate, turn_ends
from prompt_tuning.data.text.message_forms import Message
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import Tokenizer


class ChatEncoder:
    """Encodes conversations up to the next answer, as transformers encodes them.

    All messages are rendered together, and their text is encoded in one go.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer, self._template = tokenizer, template
        self._turn_ends: list[int] | None = None

    def __call__(self, record: ChatRecord, location: str) -> list[int]:
        """Returns the ids of a conversation up to its next answer.

        If the last message is from the assistant, it is continued. `location` says
        where the conversation comes from, for messages.
        """
        return self._tokenizer.encode(self._template.prompt(record, location))

    def source(self, *, tools: bool) -> str:
        """Returns the text of the template, which may differ for conversations with
        tools.
        """
        template = self._template
        return (template.tool_source if tools else None) or template.source

    def turn_ends(self) -> list[int]:
        """Returns the special tokens that the template writes after an answer."""
        if self._turn_ends is None:
            self._turn_ends = turn_ends(self._template, self._tokenizer)
        return self._turn_ends


def open_chat_encoder(
    tokenizer: Tokenizer, choice: FormatChoice, folder: Path | None = None
) -> ChatEncoder:
    """Opens the chat template that a run's data is rendered with.

    It is the one of `choice`, or else of an adapter's `folder`, or else of the
    tokenizer.
    """
    return ChatEncoder(tokenizer, choice.open_template(tokenizer, folder))


def first_turn(text: str, system: str | None = None) -> list[Message]:
    """Returns the messages of a conversation that begins with a text."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
