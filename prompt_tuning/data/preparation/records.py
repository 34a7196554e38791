"""Parses the bytes of one record into turns of prompt and completion."""

import dataclasses
import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import json_kind, parse_json, read_limited
from prompt_tuning.core.utf8_text import decode_text
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.text import conversations
from prompt_tuning.data.text.record_fields import HISTORY_KEY, refuse_unread
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.templates import Template, parse_template

NO_CATEGORY = -1
MAXIMUM_CATEGORIES = 2**24
"""Maximum size in bytes of a file of category names."""
MAXIMUM_WEIGHT = float(np.finfo(np.float32).max)
_IN_FIRST_TURN = "; in a list of turns the first object must have it"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A prompt and its completion."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a file, or one row of a table.

    Attributes:
      turns: prompts and completions in order; empty for a conversation.
      chat: a conversation that only a chat template renders; None for turns.
      category: index of the category, or `NO_CATEGORY`.
      weight: loss weight of the record's tokens.
      plain: whether the record is a line of text, used as it is.
    """

    turns: tuple[Turn, ...]
    chat: ChatRecord | None = None
    category: int = NO_CATEGORY
    weight: float = 1.0
    plain: bool = False


class RecordReader:
    """Parses records of a `RecordFormat`; its templates must not have soft prompts."""

    def __init__(self, record: RecordFormat):
        self._format = record
        self._prompt = _parse_text_template(record.prompt_template, "prompt_template")
        self._completion = _parse_text_template(
            record.completion_template, "completion_template"
        )
        self._category_ids = {name: i for i, name in enumerate(record.categories)}

    def read(self, file: InputFile, content: bytes, location: str) -> Record:
        """Parses a record; a line of plain text is a completion as it is."""
        if file.is_text:
            return Record((Turn("", decode_text(content, location)),), plain=True)
        if file.table is not None:
            return self._parse(file.table.row(content, location), location)
        value = parse_json(decode_text(content, location), location)
        return self._parse(value, location)

    def check_columns(self, file: InputFile) -> None:
        """Refuses a table without the columns that every row needs."""
        if file.table is None:
            return
        header = file.table.header
        record = self._format
        required = list(self._prompt.keys if self._prompt else ())
        has_messages = self._format.messages_key in header
        if self._format_of(header) == "pairs" and not has_messages:
            required += (
                self._completion.keys if self._completion else [record.completion_key]
            )
        required += [record.category_key] if record.categories else []
        required += [record.weight_key] if record.weight_key else []
        for name in required:
            if name not in header:
                raise InputError(
                    f"{file.path} has the columns {shown(list(header))}, expected "
                    f"{name!r}; choose columns with --prompt_key, --completion_key or "
                    "a template"
                )

    def _parse(self, value: Any, location: str) -> Record:
        objects = value if isinstance(value, list) else [value]
        for item in objects:
            if not isinstance(item, dict):
                raise InputError(
                    f"{location}: found {json_kind(item)}, expected an object "
                    "with a prompt and a completion, or a list of such objects"
                )
        if not objects:
            raise InputError(
                f"{location}: the list is empty, expected at least one turn"
            )
        category, weight = self._category_id(objects[0], location), 1.0
        if self._category_ids:
            _check_equal(objects, self._format.category_key, location)
        if self._format.weight_key is not None:
            weight = _loss_weight(objects[0], self._format.weight_key, location)
            _check_equal(objects, self._format.weight_key, location)
        chat = self._chat(objects, location)
        if chat is not None:
            return Record((), chat, category, weight)
        turns = [turn for item in objects for turn in self._turns(item, location)]
        return Record(tuple(turns), None, category, weight)

    def _chat(
        self, objects: Sequence[dict[str, Any]], location: str
    ) -> ChatRecord | None:
        record, first = self._format, objects[0]
        prompt_key, key = record.prompt_key, record.messages_key
        format = self._format_of(first)
        in_prompt = self._uses_keys and conversations.has_prompt_messages(
            first, prompt_key
        )
        has_messages = any(key in item for item in objects)
        if has_messages or in_prompt or format == "sharegpt":
            _check_one_conversation(objects, location)
        read = self._read_keys
        if has_messages:
            return conversations.read_chat_messages(first, key, location, read)
        if in_prompt:
            completion = record.completion_key
            return conversations.read_prompt_messages(
                first, prompt_key, completion, location, read
            )
        if format == "sharegpt":
            return conversations.read_sharegpt(first, location, read)
        # Without a chat template such a pair is refused.
        context = [
            k for k in (*conversations.CONTEXT_KEYS, HISTORY_KEY) if k not in read
        ]
        if not self._uses_keys or len(objects) > 1 or not any(map(first.get, context)):
            return None
        turns = self._turns(first, location, [*read, *context])
        if len(turns) != 1:
            return None
        return conversations.read_pair(
            turns[0].prompt, turns[0].completion, first, location, read
        )

    @property
    def _uses_keys(self) -> bool:
        """Whether texts are found by their keys, and not by templates."""
        return self._prompt is None and self._completion is None

    @property
    def _read_keys(self) -> list[str]:
        """The keys that are read, except in a conversation."""
        record = self._format
        keys = [record.prompt_key, record.completion_key]
        keys += [record.category_key] if record.categories else []
        return keys + ([record.weight_key] if record.weight_key else [])

    def _turns(
        self, content: dict[str, Any], location: str, read: Sequence[str] | None = None
    ) -> list[Turn]:
        record = self._format
        if self._uses_keys:
            refuse_unread(content, location, self._read_keys if read is None else read)
        if self._format_of(content) == "alpaca":
            return [Turn(*conversations.read_alpaca(content, location))]
        completions = self._texts(
            content, record.completion_key, self._completion, location
        )
        if self._prompt is None and record.prompt_key not in content:
            prompts = [""] * len(completions)
        else:
            prompts = self._texts(content, record.prompt_key, self._prompt, location)
        if len(prompts) != len(completions):
            raise InputError(
                f"{location}: {len(prompts)} prompts and {len(completions)} "
                "completions, expected the same number of both"
            )
        return [Turn(*pair) for pair in zip(prompts, completions, strict=True)]

    def _format_of(self, content: Container[str]) -> conversations.RecordFormatName:
        if not self._uses_keys:
            return "pairs"
        return conversations.recognize_format(content, self._format.completion_key)

    def _texts(
        self,
        content: dict[str, Any],
        key: str,
        template: Template | None,
        location: str,
    ) -> list[str]:
        if template is not None:
            texts = {name: _string(content, name, location) for name in template.keys}
            return template.render(texts)
        value = _lookup(content, key, location)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return value
        return [_string(content, key, location)]

    def _category_id(self, content: dict[str, Any], location: str) -> int:
        if not self._category_ids:
            return NO_CATEGORY
        name = _string(
            content,
            self._format.category_key,
            location,
            f"--category_key{_IN_FIRST_TURN}",
        )
        if name not in self._category_ids:
            raise InputError(
                f"{location}: the category is {shown(name)}, expected one of "
                f"{_list_names(self._format.categories)}"
            )
        return self._category_ids[name]


def _parse_text_template(text: str | None, name: str) -> Template | None:
    if text is None:
        return None
    template = parse_template(text, f"--{name}")
    if template.soft:
        raise InputError(
            f"--{name} {shown(text)} has soft prompts, which belong to a run and not "
            "to its data; move them to DataSource.template"
        )
    return template


def _lookup(
    content: dict[str, Any],
    key: str,
    location: str,
    options: str = "--prompt_key and --completion_key",
) -> Any:
    if key not in content:
        raise InputError(
            f"{location}: found the keys {shown(sorted(content))}, expected {key!r}; "
            f"add it, or leave the record out; if no record has it, choose keys with "
            f"{options}"
        )
    return content[key]


def _string(content: dict[str, Any], key: str, location: str, *options: str) -> str:
    value = _lookup(content, key, location, *options)
    if type(value) is int:
        # A label, such as 1; a table has it as text.
        return str(value)
    if not isinstance(value, str):
        raise InputError(
            f"{location}: {key!r} is {json_kind(value)}, expected a string"
        )
    return value


def _loss_weight(content: dict[str, Any], key: str, location: str) -> float:
    value = _lookup(content, key, location, f"--weight_key{_IN_FIRST_TURN}")
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, bool) or not 0 <= weight <= MAXIMUM_WEIGHT:
        raise InputError(
            f"{location}: {key!r} is {shown(value)}, expected a loss weight, a number "
            f"from 0 to {MAXIMUM_WEIGHT:.4g} (float32)"
        )
    return weight


def _check_equal(objects: Sequence[dict[str, Any]], key: str, location: str) -> None:
    """Refuses turns that differ in a value of the whole record."""
    first, *others = objects
    for item in others:
        if item.get(key, first[key]) != first[key]:
            raise InputError(
                f"{location}: {key!r} is {shown(first[key])} in the first object of "
                f"the list and {shown(item[key])} in another, expected one value per "
                "line: put each object on a separate line, or set the key only in the "
                "first"
            )


def _check_one_conversation(objects: Sequence[dict[str, Any]], location: str) -> None:
    if len(objects) > 1:
        raise InputError(
            f"{location}: found a list of {len(objects)} objects with messages, "
            "expected one conversation per line: put each on a separate line"
        )


def _list_names(names: Sequence[str]) -> str:
    listed = ", ".join(shown(name) for name in names[:8])
    return listed if len(names) <= 8 else f"{listed} and {len(names) - 8} more"


def read_category_names(path: str) -> tuple[str, ...]:
    """Reads a file of category names: a JSON list, or one name per line."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"categories {path}: there is no such file")
    text = decode_text(read_limited(file, MAXIMUM_CATEGORIES), str(file))
    text = text.removeprefix("\ufeff")  # a byte order mark
    is_json = text.lstrip()[:1] == "["
    names = parse_json(text, str(file)) if is_json else text.splitlines()
    names = [name for name in names if not isinstance(name, str) or name.strip()]
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} must name at least one category, each as a string")
    if len(set(names)) < len(names):
        raise InputError(f"{path} names a category twice")
    return tuple(names)
