"""Lines with conversations, encoded as `prepare --chat` encodes them."""

from collections.abc import Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import SEPARATOR
from prompt_tuning.data.rows.jsonl import JsonLine, LineEncoder, TypedRow
from prompt_tuning.data.text.chat_templates import ChatTemplate
from prompt_tuning.data.text.conversations import (
    MESSAGES_KEY,
    RecordFormatName,
    pair_messages,
    read_alpaca,
    read_messages,
    read_sharegpt,
)
from prompt_tuning.data.text.template_renderer import Message
from prompt_tuning.data.text.typed_texts import (
    RenderedText,
    TypedTextEncoder,
    conversation_text,
    until_last_answer,
)


class ConversationEncoder:
    """Encodes a conversation as one row that a chat template renders.

    Each answer has type 1, the text between answers type 0, and the last token type 3.
    Messages after the last answer are left out.

    Args:
      format: format of the lines.
      chat: template that renders the messages.
      pairs: reads the prompt and the completion of a pair; its tokenizer has an EOS.
    """

    def __init__(
        self, format: RecordFormatName, chat: ChatTemplate, pairs: LineEncoder
    ):
        self.tokenizer = tokenizer = pairs.tokenizer
        assert tokenizer.eos_id is not None
        self._format: RecordFormatName = format
        self._chat = chat
        self._pairs = pairs
        self._encode = TypedTextEncoder(tokenizer)
        self._eos_text = chat.eos_token or tokenizer.token(tokenizer.eos_id)

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether a pair has an answer; see `RowEncoder`."""
        if self._format == "alpaca":
            return bool(read_alpaca(line.content, line.location)[1])
        return self._format != "pairs" or self._pairs.has_completion(line)

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[TypedRow]:
        """Encodes lines as rows; see `RowEncoder`."""
        del add_eos  # the template ends each answer
        conversations = [self._messages(line) for line in lines]
        rendered = self._chat.render_many(conversations)
        texts = []
        for line, parts in zip(lines, rendered, strict=True):
            if isinstance(parts, str):
                raise InputError(f"{line.location}: {parts}")
            texts.append(conversation_text(parts, self._eos_text))
        return self._encode_all(lines, texts)

    def _messages(self, line: JsonLine) -> Sequence[Message]:
        if self._format == "messages":
            messages = read_messages(line.content, MESSAGES_KEY, line.location)
        elif self._format == "sharegpt":
            messages = read_sharegpt(line.content, line.location)
        elif self._format == "alpaca":
            messages = pair_messages(*read_alpaca(line.content, line.location))
        else:
            messages = pair_messages(*self._pairs.texts(line))
        messages = until_last_answer(messages)
        if not messages:
            raise InputError(
                f"{line.location}: no message of an assistant, so nothing is learned; "
                "leave the line out"
            )
        return messages

    def _encode_all(
        self, lines: Sequence[JsonLine], texts: Sequence[RenderedText]
    ) -> list[TypedRow]:
        try:
            encoded = self._encode(texts)
        except InputError:
            # Encodes one by one, to find the line.
            encoded = []
            for line, text in zip(lines, texts, strict=True):
                with line.locating_errors():
                    encoded += self._encode([text])
        for tokens in encoded:
            tokens.token_types[-1] = SEPARATOR
        return [
            (np.array(x.input_ids, np.int32), np.array(x.token_types, np.int32))
            for x in encoded
        ]
