"""Chooses how the lines of a data set are encoded, by their format."""

import dataclasses
import datetime
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.core.token_weights import SEPARATOR
from prompt_tuning.data.rows.jsonl import (
    AlpacaEncoder,
    JsonLine,
    LineEncoder,
    RowEncoder,
    TypedRow,
)
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.text import conversations
from prompt_tuning.data.text.chat_templates import (
    ChatTemplate,
    chat_template_of,
    has_chat_template,
)
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.record_fields import warn_of_unread
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.text_encoder import TypedTokens, until_last_answer
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair
from prompt_tuning.settings.data_source import LineFormat, Turns


@dataclasses.dataclass(frozen=True)
class FormatChoice:
    """How lines become conversations.

    Attributes:
      format: format of the lines; "auto" recognizes it by the keys of the first line.
      chat: whether the chat template renders pairs too.
      chat_template: path of a chat template, which renders pairs too; None for the
        tokenizer's own.
      chat_date: ISO date for a template that uses the current date.
      chat_template_kwargs: variables of the template, e.g. `enable_thinking`.
      turns: see `LearnedConversations`.
    """

    format: LineFormat = "auto"
    chat: bool = False
    chat_template: str | None = None
    chat_date: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    turns: Turns = "auto"

    @classmethod
    def of(cls, settings: Any) -> "FormatChoice":
        """Returns the choice in settings with fields of the same names."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(settings, name) for name in names})

    @property
    def renders_pairs(self) -> bool:
        """Whether a chat template renders pairs, and tasks of the format alpaca."""
        return self.chat or self.chat_template is not None

    @property
    def date(self) -> datetime.date | None:
        """`chat_date`, parsed."""
        if self.chat_date is None:
            return None
        try:
            return datetime.date.fromisoformat(self.chat_date)
        except ValueError as error:
            raise InputError(
                f"DataSource.chat_date is {shown(self.chat_date)}, expected a date "
                "such as 2026-07-26"
            ) from error

    def open_template(
        self, tokenizer: Tokenizer, folder: Path | None = None
    ) -> ChatTemplate:
        """Opens the chat template; arguments and errors as in `open_chat_encoder`."""
        template = chat_template_of(tokenizer, self.chat_template, self.date, folder)
        return dataclasses.replace(template, variables=self.chat_template_kwargs or {})


def first_record(path: Path) -> Mapping[str, Any]:
    """Returns the first record of a file, or an empty one."""
    for line in read_records(path):
        return line.content
    return {}


def format_of(
    record: Mapping[str, Any],
    format: LineFormat,
    prompt_key: str | None,
    completion_key: str,
) -> tuple[conversations.RecordFormatName, bool]:
    """Returns the format of a file's records, and whether they are chat messages.

    `record` is the first one. Pairs are chat messages if their prompts are lists of
    messages; both keys are for pairs.
    """
    if format == "auto":
        format = conversations.recognize_format(record, completion_key)
    has_messages = conversations.has_prompt_messages(record, prompt_key)
    return format, has_messages if format == "pairs" else format != "alpaca"


class ConversationEncoder:
    """Encodes a conversation as rows that a chat template renders.

    An answer has type 1, the text before it type 0, and the last token type 3. Messages
    after the last answer are left out. `pairs` reads the texts of a pair.
    """

    def __init__(
        self,
        format: conversations.RecordFormatName,
        learned: LearnedConversations,
        pairs: LineEncoder,
    ):
        self.tokenizer = pairs.tokenizer
        self._format: conversations.RecordFormatName = format
        self._learned = learned
        self._pairs = pairs
        self._read_keys = [*conversations.FORMAT_KEYS[format], *pairs.own_keys]
        self._warned = self._warned_of_end = False

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether an answer is learned; see `RowEncoder`."""
        return any(self._read(line).learned)

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[list[TypedRow]]:
        """Encodes lines as rows; see `RowEncoder`."""
        del add_eos  # the template ends each answer
        records = [self._conversation(line) for line in lines]
        if not self._warned:
            self._warned = True
            warn_of_unread(lines[0].content, lines[0].location, self._read_keys)
        rows = []
        for line, examples in zip(lines, self._learned(records), strict=True):
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
            return conversations.read_chat_messages(
                content, conversations.MESSAGES_KEY, location, elsewhere
            )
        if self._format == "sharegpt":
            return conversations.read_sharegpt(content, location, elsewhere)
        if self._format == "alpaca":
            pair = conversations.read_alpaca(content, location)
            return conversations.read_pair(*pair, content, location, elsewhere)
        key = pairs.prompt_key
        if key is not None and conversations.has_prompt_messages(content, key):
            return conversations.read_prompt_messages(
                content, key, pairs.completion_key, location, elsewhere
            )
        return conversations.read_pair(
            *pairs.texts(line), content, location, pairs.own_keys
        )


def _typed_row(tokens: TypedTokens) -> TypedRow:
    types = np.array(tokens.token_types, np.int32)
    types[-1] = SEPARATOR
    return np.array(tokens.input_ids, np.int32), types


def choose_encoder(
    path: Path, record: Mapping[str, Any], choice: FormatChoice, pairs: LineEncoder
) -> RowEncoder:
    """Returns the encoder of the lines of a data set.

    Args:
      path: first file of the data set.
      record: its first record.
      choice: how lines become conversations.
      pairs: encoder of pairs, which is returned if the lines are pairs.
    """
    if pairs.template is not None:
        if choice != FormatChoice():
            raise InputError(
                "DataSource.template builds the prompt of each line, so the line is "
                "no conversation: leave out format and the settings of chat templates"
            )
        return pairs
    format, is_chat = format_of(
        record, choice.format, pairs.prompt_key, pairs.completion_key
    )
    tokenizer = pairs.tokenizer
    rendered = is_chat or choice.renders_pairs
    if format == "pairs" and not rendered:
        _warn_of_input(path, record, pairs)
        return pairs
    if format == "alpaca" and not rendered and not has_chat_template(tokenizer):
        line_feed = "\n" if pairs.encode_pair is continued_pair else ""
        return AlpacaEncoder(
            tokenizer,
            joiner=pairs.joiner or line_feed,
            encode_pair=pairs.encode_pair,
            elsewhere=pairs.elsewhere,
        )
    chat = _open_template(path, choice, pairs)
    return ConversationEncoder(
        format, LearnedConversations(tokenizer, chat, choice.turns), pairs
    )


def _warn_of_input(path: Path, record: Mapping[str, Any], pairs: LineEncoder) -> None:
    """Warns if pairs have a part of their prompt under another key, as tasks do."""
    for key in conversations.INPUT_KEYS:
        if record.get(key) is not None and key not in pairs.own_keys:
            prompt = pairs.prompt_key
            advice = "rename it, if it is not a part of the prompt"
            if prompt == conversations.INSTRUCTION_KEY:
                advice = (
                    "leave out the keys of prompt and completion, and both are read"
                )
            warnings.warn(
                f"{path}: the prompt is {prompt!r} alone, and {key!r} is not read: "
                f"{advice}",
                stacklevel=2,
            )


def _open_template(
    path: Path, choice: FormatChoice, pairs: LineEncoder
) -> ChatTemplate:
    if pairs.joiner:
        raise InputError(
            f"DataSource.joiner is {shown(pairs.joiner)}, but {path} contains "
            "conversations, which the chat template joins: leave the joiner out"
        )
    if pairs.tokenizer.eos_id is None:
        raise InputError(
            "the tokenizer defines no EOS to end a conversation with, nor does the "
            f"model's config: give its number by "
            f"{how_to_set('Pretrained.eos_id', NUMBER)}"
        )
    try:
        chat = choice.open_template(pairs.tokenizer)
    except InputError as error:
        raise InputError(
            f"{path} contains conversations, which a chat template renders: {error}"
        ) from error
    if chat.uses_date and choice.chat_date is None:
        raise InputError(
            f"the chat template of {chat.origin} uses the current date, so rows would "
            "differ when the run is resumed on another day: set a date by "
            f"{how_to_set('DataSource.chat_date', datetime.date.today().isoformat())}"
        )
    return chat
