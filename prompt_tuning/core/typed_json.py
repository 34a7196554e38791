"""Untrusted JSON, read within limits and by type.

All JSON that the package reads passes through `parse_json`, which limits its size and
depth. Fields are then read by type and range, so a wrong one is reported with its file
and name instead of failing later.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, kind_of, shortened, shown
from prompt_tuning.core.utf8_text import decode_text

MAXIMUM_BYTES = 128 * 2**20
"""Maximum size of a JSON file; the header of a safetensors file has at most 100 MB."""
MAXIMUM_DEPTH = 100
MAXIMUM_INTEGER = 2**31 - 1
REQUIRED: Any = object()
"""Default of a field that must be present."""

NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """A JSON object with errors that name its source and the field.

    A field with null counts as absent.

    Attributes:
      source: file, or part of one, for messages.
      values: content.
    """

    source: str
    values: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def value(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a field of any type.

        Raises:
          InputError: if it is absent and has no default.
        """
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise InputError(f"{self.source} has no {shown(name)}, which is needed")
        return default

    def integer(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        minimum: int = 0,
        maximum: int = MAXIMUM_INTEGER,
    ) -> Any:
        """Returns an integer between two bounds, or the default.

        Raises:
          InputError: if it is absent without a default, not an integer, or out of
            bounds.
        """
        value = self.value(name, default)
        if name not in self:
            return value
        if type(value) is not int or not minimum <= value <= maximum:
            self.refuse(name, f"a whole number from {minimum:,} to {maximum:,}")
        return value

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        minimum: float | int = -math.inf,
        maximum: float | int = math.inf,
    ) -> Any:
        """Returns a finite number as a float, or the default; see `integer`."""
        value = self.value(name, default)
        if name not in self:
            return value
        expected = "a finite number"
        if not math.isinf(minimum):
            expected = f"a finite number from {minimum:g}"
            expected += "" if math.isinf(maximum) else f" to {maximum:g}"
        if type(value) not in (int, float):
            self.refuse(name, expected)
        try:
            value = float(value)
        except OverflowError:
            self.refuse(name, expected)
        if not math.isfinite(value) or not minimum <= value <= maximum:
            self.refuse(name, expected)
        return value

    def integers(
        self, name: str, *, minimum: int = 0, maximum: int = MAXIMUM_INTEGER
    ) -> list[int]:
        """Returns a list of integers between two bounds; see `integer`."""
        values = self.sequence(name)
        if any(type(x) is not int or not minimum <= x <= maximum for x in values):
            expected = f"whole numbers from {minimum:,} to {maximum:,}"
            self.refuse(name, f"a list of {expected}")
        return values

    def numbers(self, name: str) -> list[float]:
        """Returns a list of finite numbers; see `integer`."""
        values = {str(n): x for n, x in enumerate(self.sequence(name))}
        items = JsonObject(f"{name} in {self.source}", values)
        return [items.number(number) for number in values]

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a text, or the default; see `integer`."""
        return self._typed(name, default, str)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a Boolean, or the default; see `integer`."""
        return self._typed(name, default, bool)

    def sequence(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a list, or the default; see `integer`."""
        return self._typed(name, default, list)

    def nested(self, name: str, default: Any = REQUIRED) -> "JsonObject":
        """Returns an object within this one; its source names both."""
        value = self._typed(name, default, dict)
        return JsonObject(f"{name} in {self.source}", value)

    def refuse(self, name: str, expected: str) -> None:
        """Reports a field's value as wrong, or the field as missing.

        Raises:
          InputError: always.
        """
        if name not in self.values:
            raise InputError(
                f"{self.source} has no {shortened(name)}, expected {expected}"
            )
        raise InputError(
            f"{self.source} has {shortened(name)} = {shown(self.values[name])}, "
            f"expected {expected}"
        )

    def _typed(self, name: str, default: Any, kind: type) -> Any:
        value = self.value(name, default)
        if name in self and type(value) is not kind:
            self.refuse(name, NAMES[kind])
        return value


def json_kind(value: object) -> str:
    """Returns the name of a parsed value's type with its article, e.g. "a list"."""
    return "null" if value is None else kind_of(value)


def read_json(file: Path, *, maximum_bytes: int = MAXIMUM_BYTES) -> Any:
    """Reads the JSON of a file.

    Raises:
      InputError: if the file is missing, cannot be read, exceeds the limits or is not
        JSON.
    """
    return parse_json(read_limited(file, maximum_bytes), str(file))


def read_object(file: Path, *, maximum_bytes: int = MAXIMUM_BYTES) -> JsonObject:
    """Reads the JSON object of a file; see `read_json`.

    Raises:
      InputError: also for JSON that is not an object.
    """
    return as_object(read_json(file, maximum_bytes=maximum_bytes), str(file))


def as_object(value: Any, source: str) -> JsonObject:
    """Returns a parsed value as an object.

    Raises:
      InputError: if it is not an object.
    """
    if not isinstance(value, dict):
        kind = NAMES.get(type(value), type(value).__name__)
        raise InputError(f"{source} contains {kind}, expected a JSON object")
    return JsonObject(source, value)


def read_limited(file: Path, maximum_bytes: int) -> bytes:
    """Returns the content of a file, and never reads more than a limit.

    Raises:
      InputError: if it is missing, not a file, larger, or cannot be read.
    """
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise InputError(f"{file} is a pipe or a device, expected a file")
        with file.open("rb") as opened:
            content = opened.read(maximum_bytes + 1)
    except FileNotFoundError as error:
        raise InputError(f"{file} is missing") from error
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{shown(str(file))} cannot be read: {reason}") from error
    if len(content) > maximum_bytes:
        raise InputError(
            f"{file} has {file.stat().st_size:,} bytes, expected at most "
            f"{maximum_bytes:,}"
        )
    return content


def parse_json(
    content: str | bytes, source: str, *, distinct_names: bool = False
) -> Any:
    """Parses JSON; bytes are UTF-8.

    Args:
      content: JSON text.
      source: file or line, for messages.
      distinct_names: whether to refuse an object with a repeated name; otherwise the
        last value wins.

    Raises:
      InputError: if it is not JSON, or is nested more deeply than `MAXIMUM_DEPTH`.
    """
    if len(content) > MAXIMUM_BYTES:
        raise InputError(
            f"{source} has {len(content):,} bytes of JSON, expected at most "
            f"{MAXIMUM_BYTES:,}"
        )
    too_deep = InputError(
        f"{source} nests its JSON more than {MAXIMUM_DEPTH} levels deep"
    )
    try:
        text = content if isinstance(content, str) else decode_text(content, source)
        text = text.removeprefix("\ufeff")  # a byte order mark
        hook = _distinct if distinct_names else None
        value = json.loads(text, object_pairs_hook=hook)
    except RecursionError:
        raise too_deep from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{source} is not valid JSON: {error}") from error
    # Fewer brackets than levels are quickly counted.
    if text.count("[") + text.count("{") > MAXIMUM_DEPTH and _is_deep(value):
        raise too_deep
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; raises `ValueError` if a name is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = collections.Counter(name for name, _ in pairs)
        raise ValueError(f"it has {shown(names.most_common(1)[0][0])} more than once")
    return values


def _is_deep(value: Any) -> bool:
    """Tests whether a value is nested more deeply than `MAXIMUM_DEPTH`."""
    level = [value]
    for _ in range(MAXIMUM_DEPTH):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return False
    return True


def _members(value: Any) -> Iterator[Any]:
    """Yields the arrays and objects directly within a value."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return
    for member in value:
        if isinstance(member, dict | list):
            yield member
