"""The lines of jsonl files: JSON objects whose values are text."""

import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.typed_json import parse_json
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer, continued_pair

MAXIMUM_LINE = 2**22
"""Maximum size of a line in bytes, which bounds the time that encoding it takes."""

PairEncoder = Callable[[Tokenizer, str, str], tuple[list[int], list[int]]]
"""Encodes a prompt and its completion."""


@dataclasses.dataclass(frozen=True)
class JsonLine:
    """One object of a file.

    Attributes:
      path: path of the file.
      number: number of the line, from 1.
      content: the object.
    """

    path: Path
    number: int
    content: dict[str, Any]

    @property
    def location(self) -> str:
        """File and line, for messages."""
        return f"{self.path}, line {self.number}"

    def value(self, key: str, setting: str) -> Any:
        """Returns the value of a key.

        Args:
          key: the key.
          setting: name of the setting that contains the key, for the message.

        Raises:
          InputError: if the line does not have the key.
        """
        if key not in self.content:
            keys = shown(sorted(self.content))
            raise InputError(
                f"{self.location}: found the keys {keys}, expected {key!r}; name the "
                f"keys with {setting}"
            )
        return self.content[key]

    def text(self, key: str, setting: str = "prompt_key and completion_key") -> str:
        """Returns the string value of a key; see `value`.

        Raises:
          InputError: if the line does not have the key, or its value is not a string.
        """
        value = self.value(key, setting)
        if not isinstance(value, str):
            raise InputError(
                f"{self.location}: {key!r} is {kind_of(value)}, expected a string"
            )
        return value


def read_lines(path: Path) -> Iterator[JsonLine]:
    """Yields the lines of a file that are not empty.

    Raises:
      InputError: at a line that is not a JSON object.
    """
    with path.open("rb") as stream:
        yield from parse_lines(stream, path)


def parse_lines(stream: io.BufferedIOBase, path: Path) -> Iterator[JsonLine]:
    """Yields the lines of a stream that are not empty; see `read_lines`.

    Args:
      stream: contents of the file.
      path: name of the file, for messages.
    """
    for number in itertools.count(1):
        line = stream.readline(MAXIMUM_LINE + 1)
        if not line:
            return
        location = f"{path}, line {number}"
        if len(line) > MAXIMUM_LINE:
            raise InputError(
                f"{location}: {len(line):,} bytes or more, expected at most "
                f"{MAXIMUM_LINE:,}"
            )
        if line.strip():
            yield JsonLine(path, number, _parse_object(location, line))


def _parse_object(location: str, line: bytes) -> dict[str, Any]:
    content = parse_json(line, location)
    if not isinstance(content, dict):
        raise InputError(
            f"{location}: found {kind_of(content)}, expected an object whose "
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
      template: template of the prompt, which replaces `prompt_key` and `encode_pair`;
        None for no template.
    """

    tokenizer: Tokenizer
    prompt_key: str | None = "prompt"
    completion_key: str = "completion"
    joiner: str = ""
    encode_pair: PairEncoder = continued_pair
    template: TokenTemplate | None = None

    def __call__(self, line: JsonLine) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt and of the completion of a line.

        Raises:
          InputError: if the line lacks a key, or its text cannot be encoded.
        """
        if self.template is not None:
            keys = self.template.template.keys
            texts = {key: line.text(key, "DataSource.template") for key in keys}
            completion = self.joiner + line.text(self.completion_key)
            try:
                return self.template.encode_pair(texts, completion)
            except InputError as error:
                raise InputError(f"{line.location}: {error}") from error
        prompt = "" if self.prompt_key is None else line.text(self.prompt_key)
        completion = line.text(self.completion_key)
        joiner = self.joiner if prompt else ""
        return self.encode_pair(self.tokenizer, prompt, joiner + completion)
