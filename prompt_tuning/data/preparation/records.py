"""From the bytes of one record to its turns of prompt and completion."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.input_files import InputFile, cells, decoded
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.text.templates import Template, parse_template

NO_CATEGORY = -1
MOST_WEIGHT = float(np.finfo(np.float32).max)
ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Turn:
    """What is given and what completes it."""

    prompt: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a file, or one row of a table.

    Attributes:
      turns: prompts and completions, in order; none where it has messages.
      messages: of a chat, objects with a role and a content; None where it has turns.
      category: its place among the categories, or `NO_CATEGORY`.
      weight: of the loss of its tokens.
      plain: whether it is a line of plain text, to be taken as it stands.
    """

    turns: tuple[Turn, ...]
    messages: tuple[dict[str, Any], ...] | None = None
    category: int = NO_CATEGORY
    weight: float = 1.0
    plain: bool = False


class RecordReader:
    """Reads records as a `RecordFormat` says.

    Raises:
      InputError: if a template cannot be read, or has soft pieces.
    """

    def __init__(self, record: RecordFormat):
        self._format = record
        self._prompt = _template(record.prompt_template, "prompt_template")
        self._completion = _template(record.completion_template, "completion_template")
        self._category_of = {name: i for i, name in enumerate(record.categories)}

    def read(self, file: InputFile, content: bytes, place: str) -> Record:
        """The record of some bytes; a line of plain text is a completion as it stands.

        Raises:
          InputError: if it is malformed, lacks a key or has an unknown category.
        """
        if file.is_text:
            return Record((Turn("", decoded(content, place)),), plain=True)
        if file.delimiter is not None:
            return self._record(_row(file, content, place), place)
        try:
            found = json.loads(decoded(content, place))
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: not JSON: {error}") from error
        except ValueError as error:  # Python's limit on the digits of an integer
            raise InputError(
                f"{place}: JSON with a number too long to be read: {error}"
            ) from error
        except RecursionError as error:
            raise InputError(f"{place}: JSON nested too deep to be read") from error
        return self._record(found, place)

    def check_columns(self, file: InputFile) -> None:
        """Refuses a table that lacks a column that every row needs.

        Raises:
          InputError: with the columns found, and that which is missing.
        """
        if file.header is None:
            return
        chosen = self._format
        needed = list(self._prompt.keys if self._prompt else ())
        needed += self._completion.keys if self._completion else [chosen.completion_key]
        needed += [chosen.category_key] if chosen.categories else []
        needed += [chosen.weight_key] if chosen.weight_key else []
        for name in needed:
            if name not in file.header:
                raise InputError(
                    f"{file.path} has the columns {list(file.header)}, expected "
                    f"{name!r}; name columns with --prompt_key, --completion_key or a "
                    "template"
                )

    def _record(self, found: Any, place: str) -> Record:
        objects = found if isinstance(found, list) else [found]
        for each in objects:
            if not isinstance(each, dict):
                raise InputError(
                    f"{place}: found a {type(each).__name__}, expected an object with "
                    "a prompt and a completion, or a list of them"
                )
        if not objects:
            raise InputError(f"{place}: the list is empty, expected at least one turn")
        category, weight = self._category(objects[0], place), 1.0
        if self._category_of:
            _check_alike(objects, self._format.category_key, place)
        if self._format.weight_key is not None:
            weight = _weight(objects[0], self._format.weight_key, place)
            _check_alike(objects, self._format.weight_key, place)
        if any(self._format.messages_key in each for each in objects):
            _check_one_conversation(objects, place)
            messages = _messages(objects[0], self._format.messages_key, place)
            return Record((), messages, category, weight)
        turns = [turn for each in objects for turn in self._turns(each, place)]
        return Record(tuple(turns), None, category, weight)

    def _turns(self, content: dict[str, Any], place: str) -> list[Turn]:
        completions = self._texts(
            content, self._format.completion_key, self._completion, place
        )
        if self._prompt is None and self._format.prompt_key not in content:
            prompts = [""] * len(completions)
        else:
            prompts = self._texts(content, self._format.prompt_key, self._prompt, place)
        if len(prompts) != len(completions):
            raise InputError(
                f"{place}: {len(prompts)} prompts and {len(completions)} completions, "
                "expected as many of each"
            )
        return [Turn(*pair) for pair in zip(prompts, completions, strict=True)]

    def _texts(
        self, content: dict[str, Any], key: str, template: Template | None, place: str
    ) -> list[str]:
        if template is not None:
            texts = {name: _text(content, name, place) for name in template.keys}
            return template.runs(texts)
        found = _value(content, key, place)
        if isinstance(found, list) and all(isinstance(text, str) for text in found):
            return found
        return [_text(content, key, place)]

    def _category(self, content: dict[str, Any], place: str) -> int:
        if not self._category_of:
            return NO_CATEGORY
        name = _text(
            content, self._format.category_key, place, f"--category_key{OF_LIST}"
        )
        if name not in self._category_of:
            raise InputError(
                f"{place}: the category is {name!r}, expected one of "
                f"{_some(self._format.categories)}"
            )
        return self._category_of[name]


def _template(text: str | None, name: str) -> Template | None:
    if text is None:
        return None
    template = parse_template(text, f"--{name}")
    if template.soft:
        raise InputError(
            f"--{name} {text!r} has soft pieces, which are a run's and not the data's; "
            "put them into DataSource.template"
        )
    return template


def _row(file: InputFile, content: bytes, place: str) -> dict[str, str]:
    header = file.header or ()
    found = cells(file, content, place)
    if len(found) != len(header):
        raise InputError(
            f"{place}: {len(found)} cells, expected {len(header)}, one for each of the "
            f"columns {list(header)}"
        )
    return dict(zip(header, found, strict=True))


OF_LIST = "; a list of turns says it in its first object"


def _value(
    content: dict[str, Any],
    key: str,
    place: str,
    named_by: str = "--prompt_key and --completion_key",
) -> Any:
    if key not in content:
        raise InputError(
            f"{place}: found the keys {sorted(content)}, expected {key!r}; name the "
            f"keys with {named_by}"
        )
    return content[key]


def _text(content: dict[str, Any], key: str, place: str, *named_by: str) -> str:
    found = _value(content, key, place, *named_by)
    if not isinstance(found, str):
        raise InputError(
            f"{place}: {key!r} is a {type(found).__name__}, expected a string"
        )
    return found


def _weight(content: dict[str, Any], key: str, place: str) -> float:
    found = _value(content, key, place, f"--weight_key{OF_LIST}")
    try:
        weight = float(found)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if isinstance(found, bool) or not 0 <= weight <= MOST_WEIGHT:
        shown = repr(found) if len(repr(found)) < 40 else f"{repr(found)[:40]}..."
        raise InputError(
            f"{place}: {key!r} is {shown}, expected a number from 0 to "
            f"{MOST_WEIGHT:.4g} (float32), the weight of the line's loss"
        )
    return weight


def _check_alike(objects: Sequence[dict[str, Any]], key: str, place: str) -> None:
    """Refuses turns that say otherwise than the first what a whole line is or weighs.

    Raises:
      InputError: with both values.
    """
    first, *others = objects
    for each in others:
        if each.get(key, first[key]) != first[key]:
            raise InputError(
                f"{place}: {key!r} is {first[key]!r} in the first object of the list "
                f"and {each[key]!r} in another, but a line is one article, with one of "
                "it: give each a line of its own, or say it in the first alone"
            )


def _check_one_conversation(objects: Sequence[dict[str, Any]], place: str) -> None:
    if len(objects) > 1:
        raise InputError(
            f"{place}: found a list of {len(objects)} objects with messages, expected "
            "one conversation to a line: give each a line of its own"
        )


def _messages(
    content: dict[str, Any], key: str, place: str
) -> tuple[dict[str, Any], ...]:
    found = content[key]
    well = isinstance(found, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in found
    )
    if not well or not found:
        raise InputError(
            f"{place}: {key!r} must be a list of objects, each with the strings 'role' "
            f"({', '.join(ROLES)}) and 'content'"
        )
    return tuple(found)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def category_names(path: str) -> tuple[str, ...]:
    """The names in a file: a list in JSON, or one to a line.

    Raises:
      InputError: if there is no such file, or its names are not each its own.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"categories {path}: there is no such file")
    text = decoded(file.read_bytes(), str(file))
    try:
        names = json.loads(text) if text.lstrip()[:1] == "[" else text.splitlines()
    except ValueError as error:
        raise InputError(f"{path} is not a list in JSON: {error}") from error
    names = [name for name in names if not isinstance(name, str) or name.strip()]
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} must name at least one category, each a string")
    if len(set(names)) < len(names):
        raise InputError(f"{path} names a category twice")
    return tuple(names)
