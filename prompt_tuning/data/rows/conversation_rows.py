"""Lines with conversations, encoded as `prepare --chat` encodes them."""

import warnings
from collections.abc import Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import SEPARATOR
from prompt_tuning.data.rows.jsonl import JsonLine, LineEncoder, TypedRow
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
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.record_fields import warn_of_unread
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.typed_texts import TypedTokens, until_last_answer


class ConversationEncoder:
    """Encodes a conversation as rows that a chat template renders.

    An answer has type 1, the text before it type 0, and the last token type 3. Messages
    after the last answer are left out. `pairs` reads the texts of a pair.
    """

    def __init__(
        self,
        format: RecordFormatName,
        learned: LearnedConversations,
        pairs: LineEncoder,
    ):
        self.tokenizer = pairs.tokenizer
        self._format: RecordFormatName = format
        self._learned = learned
        self._pairs = pairs
        self._read_keys = [*FORMAT_KEYS[format], *pairs.own_keys]
        self._warned = self._warned_of_end = False

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether an answer is learned; see `RowEncoder`."""
        return any(self._read(line).learned)

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[list[TypedRow]]:
        """Encodes lines as rows; see `RowEncoder`."""
        del add_eos  # the template ends each answer
        conversations = [self._conversation(line) for line in lines]
        if not self._warned:
            self._warned = True
            warn_of_unread(lines[0].content, lines[0].location, self._read_keys)
        rows = []
        for line, examples in zip(lines, self._learned(conversations), strict=True):
            if isinstance(examples, str):
                raise InputError(f"{line.location}: {examples}")
            rows.append([_typed_row(example) for example in examples])
        return rows

    def _conversation(self, line: JsonLine) -> ChatRecord:
        whole = self._read(line)
        record = until_last_answer(whole)
        if whole.messages[-1]["role"] == "user" and not self._warned_of_end:
            self._warned_of_end = True
            warnings.warn(
                f"{line.location}: the conversation ends with a message of the user "
                "that nothing answers, which is left out, as in other lines like this",
                stacklevel=2,
            )
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


def _typed_row(tokens: TypedTokens) -> TypedRow:
    types = np.array(tokens.token_types, np.int32)
    types[-1] = SEPARATOR
    return np.array(tokens.input_ids, np.int32), types
