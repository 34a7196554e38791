"""Conversations as ids, up to the answer that comes next."""

from pathlib import Path

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.text.chat_templates import ChatTemplate, chat_template_of
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.template_renderer import ChatRecord, Message
from prompt_tuning.data.text.text_encoder import TextEncoder
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer

PLACEHOLDER = "answer"
"""Content of the answer that is rendered to find the text before and after it."""


class ChatEncoder:
    """Encodes conversations up to the next answer, as training encodes them.

    Args:
      tokenizer: tokenizer of the model.
      template: its chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer, self._template = tokenizer, template
        self._encode = TextEncoder(tokenizer)
        self._turn_ends: list[int] | None = None

    def __call__(self, record: ChatRecord, location: str) -> list[int]:
        """Returns the ids of a conversation and of what precedes its next answer.

        Args:
          record: the conversation, ending with a turn of the user.
          location: where it comes from, for messages.

        Raises:
          InputError: if the template does not accept it.
        """
        texts = [text for text, _ in self._render(record, location)[:-1]]
        (parts,) = self._encode([texts])
        return [token for ids in parts for token in ids]

    def source(self, *, tools: bool) -> str:
        """Returns the text of the template, for conversations with or without tools."""
        template = self._template
        return (template.tool_source if tools else None) or template.source

    def turn_ends(self) -> list[int]:
        """Returns the special token that the template writes after an answer, if any.

        Raises:
          InputError: if the template does not accept a conversation of two messages.
        """
        if self._turn_ends is not None:
            return self._turn_ends
        message = {"role": "user", "content": "question"}
        answer, _ = self._render(answers_of([message]), "the chat template")[-1]
        after = answer.rpartition(PLACEHOLDER)[2].strip()
        ids = self._tokenizer.encode(after)
        ends = ids[:1] if ids and _is_special(self._tokenizer, ids[0]) else []
        self._turn_ends = ends
        return ends

    def _render(self, record: ChatRecord, location: str) -> list[tuple[str, int]]:
        """Renders a conversation with a next answer; its text is the last."""
        answer = {"role": "assistant", "content": PLACEHOLDER}
        record = record._replace(
            messages=(*record.messages, answer), learned=(*record.learned, True)
        )
        texts = self._template.render(record, location)
        if PLACEHOLDER not in texts[-1][0]:
            raise InputError(
                f"{location}: the chat template of {self._template.origin} does not "
                "end with the answer"
            )
        return list(texts)


def open_chat_encoder(
    tokenizer: Tokenizer, choice: FormatChoice, folder: Path | None = None
) -> ChatEncoder:
    """Opens the chat template that a run's data is rendered with.

    Args:
      tokenizer: tokenizer of the model.
      choice: the template, if the data does not use the tokenizer's.
      folder: folder with an adapter's template; None for the tokenizer's.

    Raises:
      InputError: if there is no template, or it cannot be used.
    """
    file, date = choice.chat_template, choice.date
    template = chat_template_of(tokenizer, file, date, folder)
    return ChatEncoder(tokenizer, template)


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Returns whether a token is special, and so never a part of an answer's text."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    added = tokenizer.tokenizer.get_added_tokens_decoder().get(token)
    return added is not None and added.special


def first_turn(text: str, system: str | None = None) -> list[Message]:
    """Returns the messages of a conversation that begins with a text."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
