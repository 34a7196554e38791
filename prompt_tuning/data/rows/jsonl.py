"""The lines of jsonl files: JSON objects with texts as values."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.token_weights import COMPLETION, PROMPT, SEPARATOR
from prompt_tuning.core.typed_json import json_kind, parse_json
from prompt_tuning.data.rows.compressed_files import open_content
from prompt_tuning.data.text import conversations, record_fields
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair, encode_prompt

MAXIMUM_LINE = 2**22
"""Maximum size of a line in bytes, which bounds the time that encoding it takes."""

_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{0,15})?([eE][+-]?[0-9]{1,2})?")
_TRUTHS = {"true": True, "false": False}

PairEncoder = Callable[[Tokenizer, str, str], tuple[list[int], list[int]]]
"""Encodes a prompt and its completion."""

TypedRow = tuple[Int32[np.ndarray, "n"], Int32[np.ndarray, "n"]]
"""The token ids of a row, and their types."""


@dataclasses.dataclass(frozen=True)
class JsonLine:
    """One object of a file: a line, the row of a table, or an item of a JSON list.

    Attributes:
      path: path of the file.
      number: number of the line, from 1.
      content: the object.
      unit: name of what `number` counts, for messages.
      typed: whether values have types; in a table all are texts.
    """

    path: Path
    number: int
    content: dict[str, Any]
    unit: str = "line"
    typed: bool = True

    @property
    def location(self) -> str:
        """File and line, for messages."""
        return f"{self.path}, {self.unit} {self.number}"

    @contextlib.contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Adds the location to the messages of errors within the block."""
        try:
            yield
        except InputError as error:
            if str(error).startswith(self.location):
                raise
            raise InputError(f"{self.location}: {error}") from error

    def value(self, key: str, setting: str) -> Any:
        """Returns the value of a key, which `setting` names."""
        if key not in self.content:
            keys = shown(sorted(self.content))
            option = setting
            if setting.endswith("_key"):
                option = how_to_set(setting, "KEY")
            advice = f"name the key with {option}"
            if self.typed and self.unit != "row" and self.number > 1:
                # Other lines may have the key, unlike rows of one table.
                advice = f"add it, or leave the line out; if no line has it, {advice}"
            raise InputError(
                f"{self.location}: found the keys {keys}, expected {key!r}; {advice}"
            )
        return self.content[key]

    def scalar(self, key: str, setting: str) -> Any:
        """Returns the value of a key, or what a table's cell contains.

        A cell may have a number, or true or false as JSON or pandas write them.
        """
        value = self.value(key, setting)
        if self.typed or not isinstance(value, str):
            return value
        if value.lower() in _TRUTHS:
            return _TRUTHS[value.lower()]
        if not _NUMBER.fullmatch(value):
            return value
        return int(value) if value.lstrip("-").isdigit() else float(value)

    def text(self, key: str, setting: str) -> str:
        """Returns the string value of a key, or a whole number as text; see `value`."""
        value = self.value(key, setting)
        if type(value) is int:
            # A label, such as 1; a table has it as text.
            return str(value)
        if not isinstance(value, str):
            raise InputError(
                f"{self.location}: {key!r} is {json_kind(value)}, expected a string"
            )
        return value


@runtime_checkable
class RowEncoder(Protocol):
    """Encodes lines of one format as rows."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    def has_completion(self, line: JsonLine) -> bool:
        """Tests whether a line has more to learn than the end of a text."""
        ...

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[list[TypedRow]]:
        """Encodes the lines of a file as one or more rows each, perhaps with EOS.

        The message about a line that cannot be encoded gives its location.
        """
        ...


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yields the lines of a file, without empty ones."""
    with open_content(path) as stream:
        yield from parse_lines(stream, path)


def parse_lines(stream: io.BufferedIOBase, path: Path) -> Iterator[JsonLine]:
    """Yields the lines of a stream, without empty ones."""
    for number, location, line in numbered_lines(stream, path):
        yield JsonLine(path, number, _parse_object(location, line))


def numbered_lines(
    stream: io.BufferedIOBase, path: Path
) -> Iterator[tuple[int, str, bytes]]:
    """Yields number, location and content of the lines, without empty ones."""
    lines = iter(lambda: stream.readline(MAXIMUM_LINE + 1), b"")
    for number, line in enumerate(lines, start=1):
        location = f"{path}, line {number}"
        if len(line) > MAXIMUM_LINE:
            raise InputError(
                f"{location}: {len(line):,} bytes or more, expected at most "
                f"{MAXIMUM_LINE:,}"
            )
        if line.strip():
            yield number, location, line


def _parse_object(location: str, line: bytes) -> dict[str, Any]:
    content = parse_json(line, location)
    if not isinstance(content, dict):
        raise InputError(
            f"{location}: found {json_kind(content)}, expected an object whose "
            "values are text"
        )
    return content


@dataclasses.dataclass(frozen=True)
class LineEncoder:
    """Encodes the prompt and the completion of a line.

    Attributes:
      tokenizer: encodes the text.
      prompt_key: key of the prompt; None if lines have no prompt.
      completion_key: key of the completion.
      joiner: text inserted before a completion that follows a prompt.
      encode_pair: encodes both: `continued_pair` for one text in two parts, or
        `separate_pair` for two texts.
      template: template of the prompt, instead of `prompt_key` and `encode_pair`.
      elsewhere: more keys of a line that something else reads, e.g. its weight.
    """

    tokenizer: Tokenizer
    prompt_key: str | None = "prompt"
    completion_key: str = "completion"
    joiner: str = ""
    encode_pair: PairEncoder = continued_pair
    template: TokenTemplate | None = None
    elsewhere: frozenset[str] = frozenset()

    @property
    def own_keys(self) -> frozenset[str]:
        """All keys of a line that something reads."""
        own = {self.completion_key, self.prompt_key or self.completion_key}
        return self.elsewhere | own

    def __call__(self, line: JsonLine) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt and of the completion of a line."""
        if self.template is not None:
            keys = self.template.template.keys
            texts = {key: line.text(key, "DataSource.template") for key in keys}
            completion = self.joiner + self._completion(line)
            return self.template.encode_pair(texts, completion)
        record_fields.refuse_unread(line.content, line.location, self.own_keys)
        prompt, completion = self.texts(line)
        joiner = self.joiner if prompt else ""
        return self.encode_pair(self.tokenizer, prompt, joiner + completion)

    def texts(self, line: JsonLine) -> tuple[str, str]:
        """Returns the prompt and the completion of a line."""
        key = self.prompt_key
        prompt = "" if key is None else line.text(key, "DataSource.prompt_key")
        return prompt, self._completion(line)

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether the completion is not empty; see `RowEncoder`."""
        if self.template is not None:
            return bool(self._completion(line))
        return bool(self.texts(line)[1])

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[list[TypedRow]]:
        """Encodes lines as rows; see `RowEncoder`."""
        rows = []
        for line in lines:
            with line.locating_errors():
                rows.append([_pair_row(self.tokenizer, *self(line), add_eos)])
        return rows

    def _completion(self, line: JsonLine) -> str:
        return line.text(self.completion_key, "DataSource.completion_key")


@dataclasses.dataclass(frozen=True)
class AlpacaEncoder(LineEncoder):
    """Encodes the tasks of the format alpaca without a chat template.

    A decoder-only model reads the output on a new line, unless there is a joiner.
    """

    def texts(self, line: JsonLine) -> tuple[str, str]:
        """Returns instruction with input, and output; see `LineEncoder`."""
        return conversations.read_alpaca(line.content, line.location)


def _pair_row(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], add_eos: bool
) -> TypedRow:
    begin = encode_prompt(tokenizer, "")
    end = [tokenizer.eos_id] if add_eos else []
    types = [PROMPT] * (len(begin) + len(prompt))
    types += [COMPLETION] * len(completion) + [SEPARATOR] * len(end)
    ids = np.array([*begin, *prompt, *completion, *end], np.int32)
    return ids, np.array(types, np.int32)
