"""Encode inputs without targets, in the same way as training prompts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import NUMBER, how_to_set
from prompt_tuning.data.examples.truncation import truncation_of
from prompt_tuning.data.rows.jsonl import JsonLine
from prompt_tuning.data.rows.line_formats import FormatChoice
from prompt_tuning.data.rows.tasks import Tasks
from prompt_tuning.data.source_reading import row_keys, tasks_of
from prompt_tuning.data.text.chat_templates import has_chat_template
from prompt_tuning.data.text.conversations import (
    INSTRUCTION_KEY,
    conversation_key,
    has_prompt_messages,
    joined_text,
    read_chat_messages,
    read_pair,
    read_task,
    without_answer,
)
from prompt_tuning.data.text.record_fields import WEIGHTS, refuse_unread
from prompt_tuning.data.text.templates import parse_template
from prompt_tuning.decoding.row_checks import check_rows
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.settings.data_source import DataSource

PROMPT_KEY = "prompt"
"""Key of plain texts for a run with data that has no prompts."""


class EncodedInputs(NamedTuple):
    """Inputs as a model reads them.

    Attributes:
      texts: their texts, without the prompt vectors of a template.
      rows: their token ids.
      prompt_ids: prompt of each if the model has more than one, else None.
      records: other keys of each line, which are not in `texts`.
      locations: file and line of each, for messages.
    """

    texts: list[str]
    rows: list[list[int]]
    prompt_ids: list[int] | None
    records: list[dict[str, Any]]
    locations: list[str]


def text_key(source: DataSource) -> str:
    """Returns the key for a plain text: that of prompts, or of the template.

    Raises:
      InputError: if the template has more than one key.
    """
    if source.template is None:
        return source.prompt_key or PROMPT_KEY
    keys = parse_template(source.template).keys
    if len(keys) != 1:
        raise InputError(
            f"DataSource.template has the keys {list(keys)}, so a plain text is not an "
            "input: use a jsonl file whose lines have these keys"
        )
    return keys[0]


def encode_inputs(
    model: PromptedModel,
    source: DataSource,
    lines: Sequence[JsonLine],
    prompt_id: int | None = None,
) -> EncodedInputs:
    """Encodes inputs in the same way as training prompts.

    Lines have the keys of the data, or are plain texts; see `text_records`. Without
    `prompt_id`, each input selects its own prompt.
    """
    encode = _InputEncoder(model, source)
    tasks = None if prompt_id is not None else tasks_of(source, model.interface)
    several = prompt_id is not None or tasks is not None
    inputs = EncodedInputs([], [], [] if several else None, [], [])
    for line in lines:
        text, row, record = encode(line)
        task = prompt_id
        if tasks is not None:
            task, row = _select_prompt(tasks, line, row)
        inputs.texts.append(text)
        inputs.rows.append(row)
        inputs.records.append(record)
        inputs.locations.append(line.location)
        if inputs.prompt_ids is not None and task is not None:
            inputs.prompt_ids.append(task)
    return inputs


class _InputEncoder:
    """Encodes the text or the conversation of a line."""

    def __init__(self, model: PromptedModel, source: DataSource):
        self._source, self._encoding = source, TextEncoding(model, source)
        self._key = source.prompt_key or PROMPT_KEY
        self._read = {self._key, source.completion_key, *row_keys(source), *WEIGHTS}

    def __call__(self, line: JsonLine) -> tuple[str, list[int], dict[str, Any]]:
        """Returns the text of a line, its ids, and the keys that the text lacks."""
        encoding = self._encoding
        if encoding.template is not None:
            template = encoding.template.template
            values = {
                key: line.text(key, "DataSource.template") for key in template.keys
            }
            text = "".join(template.render(values))
            return text, encoding.encode_keys(values), dict(line.content)
        content, location, read_text = line.content, line.location, self._read
        key = self._key if self._key in content else conversation_key(content)
        if key is not None and (
            key != self._key or has_prompt_messages(content, self._key)
        ):
            record = without_answer(
                read_chat_messages(content, key, location, read_text)
            )
            text = joined_text(record.messages[-1]) if record.messages else ""
            return text, encoding.chat(record, location), dict(content)
        is_task = self._key not in content and INSTRUCTION_KEY in content
        if is_task:
            text = read_task(content, location)
        else:
            text = line.text(self._key, "DataSource.prompt_key")
        others = {name: x for name, x in content.items() if name != self._key}
        if FormatChoice.of(self._source).renders_pairs or (
            is_task and has_chat_template(encoding.model.needed_tokenizer())
        ):
            record = read_pair(text, "", content, location, read_text)
            return text, encoding.chat(record, location), others
        refuse_unread(content, location, read_text)
        return text, encoding.encode(text), others


def _select_prompt(
    tasks: Tasks, line: JsonLine, row: list[int]
) -> tuple[int, list[int]]:
    """Returns the prompt that a line selects, and its row without the task token."""
    if tasks.key is not None:
        setting = (
            f"{how_to_set('DataSource.prompt_id_key', 'KEY')}, or choose one prompt "
            f"for all ({how_to_set('prompt_id', NUMBER)})"
        )
        return tasks.parse(line.value(tasks.key, setting), line.location), row
    assert tasks.token is not None
    number, rest = tasks.token.split(np.array(row, np.int64))
    return int(number), rest.tolist()


def fit_inputs(
    model: PromptedModel, source: DataSource, inputs: EncodedInputs, new_tokens: int
) -> list[list[int]]:
    """Returns rows that leave room for an answer.

    As in evaluation, longer ones are cut if the data's are (`DataSource.on_too_long`).

    Raises:
      InputError: for the first row that is too long.
    """
    decoder_only = model.config.architecture == "decoder_only"
    truncation = truncation_of(source, model.interface, same_tokens=decoder_only)
    rows = []
    for location, row in zip(inputs.locations, inputs.rows, strict=True):
        try:
            if truncation is not None and truncation.maximum > new_tokens:
                row = truncation.cut_prompt(row, truncation.maximum - new_tokens)
            check_rows(model, [row], new_tokens)
        except InputError as problem:
            raise InputError(f"{location}: {problem}") from problem
        rows.append(row)
    return rows
