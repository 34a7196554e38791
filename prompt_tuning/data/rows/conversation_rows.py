"""Lines with conversations, encoded as `prepare --chat` encodes them."""

from collections.abc import Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import SEPARATOR
from prompt_tuning.data.rows.jsonl import JsonLine, LineEncoder, TypedRow
from prompt_tuning.data.text.chat_templates import ChatTemplate
from prompt_tuning.data.text.conversations import (
    FORMAT_KEYS,
    MESSAGES_KEY,
    RecordFormatName,
    has_prompt_messages,
    read_alpaca,
    read_chat_messages,
    read_pair,
    read_prompt_messages,
    read_sharegpt,
)
from prompt_tuning.data.text.record_fields import warn_of_unread
from prompt_tuning.data.text.template_renderer import ChatRecord
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
        self._read_keys = [*FORMAT_KEYS[format], *pairs.own_keys]
        self._warned = False
        self._encode = TypedTextEncoder(tokenizer)
        self._eos_text = chat.eos_token or tokenizer.token(tokenizer.eos_id)

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether an answer is learned; see `RowEncoder`."""
        return any(self._read(line).learned)

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[TypedRow]:
        """Encodes lines as rows; see `RowEncoder`."""
        del add_eos  # the template ends each answer
        conversations = [self._conversation(line) for line in lines]
        if not self._warned:
            self._warned = True
            warn_of_unread(lines[0].content, lines[0].location, self._read_keys)
        rendered = self._chat.render_many(conversations)
        texts = []
        for line, parts in zip(lines, rendered, strict=True):
            if isinstance(parts, str):
                raise InputError(f"{line.location}: {parts}")
            texts.append(conversation_text(parts, self._eos_text))
        return self._encode_all(lines, texts)

    def _conversation(self, line: JsonLine) -> ChatRecord:
        record = until_last_answer(self._read(line))
        if not record.messages:
            raise InputError(
                f"{line.location}: no message of an assistant that is learned, so "
                "nothing is learned; leave the line out"
            )
        return record

    def _read(self, line: JsonLine) -> ChatRecord:
        pairs, elsewhere = self._pairs, self._pairs.elsewhere
        content, location = line.content, line.location
        if self._format == "messages":
            return read_chat_messages(content, MESSAGES_KEY, location, elsewhere)
        if self._format == "sharegpt":
            return read_sharegpt(content, location, elsewhere)
        if self._format == "alpaca":
            pair = read_alpaca(content, location)
            return read_pair(*pair, content, location, elsewhere)
        key = pairs.prompt_key
        if key is not None and has_prompt_messages(content, key):
            return read_prompt_messages(
                content, key, pairs.completion_key, location, elsewhere
            )
        return read_pair(*pairs.texts(line), content, location, pairs.own_keys)

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
