"""Files of JSON lines: objects whose values are texts."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.templates import TokenTemplate
from prompt_tuning.data.text.tokenizers import Tokenizer

PairEncoder = Callable[[Tokenizer, str, str], tuple[list[int], list[int]]]


@dataclasses.dataclass(frozen=True)
class Line:
    """One object of a file.

    Attributes:
      path: the file.
      number: of the line, from 1.
      content: the object.
    """

    path: Path
    number: int
    content: dict[str, Any]

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.path}, line {self.number}"

    def value(self, key: str, named_by: str) -> Any:
        """What the line has under a key.

        Raises:
          InputError: if it has no such key; the message says what named it.
        """
        if key not in self.content:
            raise InputError(
                f"{self.place}: found the keys {sorted(self.content)}, expected "
                f"{key!r}; name the keys with {named_by}"
            )
        return self.content[key]

    def text(self, key: str, named_by: str = "prompt_key and completion_key") -> str:
        """The string that the line has under a key.

        Raises:
          InputError: if there is none.
        """
        found = self.value(key, named_by)
        if not isinstance(found, str):
            raise InputError(
                f"{self.place}: {key!r} is a {type(found).__name__}, expected a string"
            )
        return found


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not empty.

    Raises:
      InputError: at a line that is not a JSON object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Line(path, number, _object(f"{path}, line {number}", line))


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{place}: not JSON in UTF-8: {error}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"{place}: found a {type(content).__name__}, expected an object whose "
            "values are texts"
        )
    return content


@dataclasses.dataclass(frozen=True)
class LinePairs:
    """How a line becomes the ids of what is given, and of what completes it.

    Attributes:
      tokenizer: from text to ids.
      prompt_key: key of the given text; None where there is none.
      completion_key: key of the text to learn.
      joiner: put before the completion where something is given; texts are otherwise
        taken as they are.
      encode_pair: the ids of a prompt and its completion.
      template: what is given, in place of the text under `prompt_key`; it encodes both.
    """

    tokenizer: Tokenizer
    prompt_key: str | None
    completion_key: str
    joiner: str
    encode_pair: PairEncoder
    template: TokenTemplate | None

    def __call__(self, line: Line) -> tuple[list[int], list[int]]:
        """The pair of a line.

        Raises:
          InputError: if the line has not the keys, or a text cannot be encoded.
        """
        if self.template is not None:
            keys = self.template.template.keys
            named_by = "DataSource.template"
            texts = {key: line.text(key, named_by) for key in keys}
            completion = self.joiner + line.text(self.completion_key)
            try:
                return self.template.pair(texts, completion)
            except InputError as error:
                raise InputError(f"{line.place}: {error}") from error
        prompt = "" if self.prompt_key is None else line.text(self.prompt_key)
        completion = line.text(self.completion_key)
        joiner = self.joiner if prompt else ""
        return self.encode_pair(self.tokenizer, prompt, joiner + completion)
