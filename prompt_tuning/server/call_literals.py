"""Grammars of calls with nested literals of a language as arguments."""

import abc
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prompt_tuning.server.call_forms import QUOTE, types_of
from prompt_tuning.server.call_grammars import (
    CallForm,
    Rules,
    UnwritableError,
    arguments_of,
    check_name,
    choices_of,
    list_of,
    quoted,
    repeated,
    without,
)

KINDS = ("string", "number", "boolean", "null", "array", "object")
"""Types of JSON values."""


class LiteralForm(CallForm):
    """Arguments as literals; subclasses define their syntax.

    Args:
      between: text between calls.
      comma: text between arguments, and between list items.
      names: expression of argument names.
      forbidden: texts that must not occur in a text.
    """

    def __init__(self, between: str, comma: str, names: str, forbidden: Sequence[str]):
        super().__init__(between)
        self._comma, self._names, self._forbidden = comma, names, forbidden

    @abc.abstractmethod
    def _text(self, rules: Rules) -> str:
        """Returns the grammar of a quoted text."""

    @abc.abstractmethod
    def _literal(self, value: Any) -> str:
        """Returns the literal of a text, a boolean or null."""

    @abc.abstractmethod
    def _mapping(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of an object."""

    def _pairs(self, parameters: Mapping[str, Any], rules: Rules, sign: str) -> str:
        """Returns the grammar of names and values, separated by commas."""
        first, later, empty = "", "", True
        for key, schema, required in reversed(self._sorted(arguments_of(parameters))):
            check_name(key, self._names)
            pair = f"{quoted(key + sign)} {self._value(schema, rules)}"
            begun, follows = f"{pair} {later}", f"{quoted(self._comma)} {pair}"
            first = rules.add(begun if required or not first else f"{begun} | {first}")
            later = rules.add(f"{follows if required else f'({follows})?'} {later}")
            empty = empty and not required
        return f"({first})?" if first and empty else first

    def _sorted(
        self, arguments: list[tuple[str, Any, bool]]
    ) -> list[tuple[str, Any, bool]]:
        """Returns the arguments in the order that templates write."""
        return arguments

    def _value(self, schema: Any, rules: Rules) -> str:
        return f"({' | '.join(self._values(schema, rules))})"

    def _values(self, schema: Any, rules: Rules) -> Iterator[str]:
        if schema is True or schema == {}:
            yield rules.recursive("anything", functools.partial(self._anything, rules))
            return
        if not isinstance(schema, dict) or "$ref" in schema or "allOf" in schema:
            raise UnwritableError
        if chosen := choices_of(schema):
            yield from (quoted(self._literal(each)) for each in chosen)
            return
        several = [
            x for name in ("anyOf", "oneOf") for x in list_of(schema.get(name, []))
        ]
        for each in several:
            yield from self._values(each, rules)
        if several:
            return
        for kind in sorted(types_of(schema) or KINDS):
            yield self._of_kind(kind, schema, rules)

    def _anything(self, rules: Rules) -> str:
        return " | ".join(self._of_kind(kind, {}, rules) for kind in KINDS)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], rules: Rules) -> str:
        if kind == "string":
            return self._text(rules)
        if kind == "boolean":
            return " | ".join(quoted(self._literal(x)) for x in (True, False))
        if kind == "null":
            return quoted(self._literal(None))
        if kind == "array":
            items = repeated(self._value(schema.get("items", {}), rules), self._comma)
            return f'"[" ({items})? "]"'
        if kind == "object":
            return self._mapping(schema, rules)
        return rules.json({**schema, "type": kind})


class BracedForm(LiteralForm):
    """Gemma 4's form: `call:NAME{KEY:VALUE}`, sorted keys, a token as quotes."""

    def __init__(self):
        super().__init__("", ",", r"[\w.$-]+", (QUOTE, "<|tool_call>", "<tool_call|>"))

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        return rules.add(f"{quoted(f'call:{name}')} {self._mapping(parameters, rules)}")

    def _sorted(
        self, arguments: list[tuple[str, Any, bool]]
    ) -> list[tuple[str, Any, bool]]:
        return sorted(arguments, key=lambda each: each[0].lower())

    def _text(self, rules: Rules) -> str:
        return f"{quoted(QUOTE)} {rules.text(QUOTE, self._forbidden)}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, list | dict):
            raise UnwritableError
        return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)

    def _mapping(self, schema: Mapping[str, Any], rules: Rules) -> str:
        if schema.get("properties") or schema.get("additionalProperties") is False:
            return f'"{{" {self._pairs(schema, rules, ":")} "}}"'
        key = rules.add(f"/{self._names}/", "R")
        pairs = repeated(f'{key} ":" {self._value({}, rules)}', self._comma)
        return f'"{{" ({pairs})? "}}"'


class PythonForm(LiteralForm):
    """LFM2's form: `[NAME(KEY=VALUE)]`, with Python texts and JSON objects."""

    def __init__(self):
        super().__init__(", ", ", ", r"[A-Za-z_]\w*", ("<|tool_call_",))

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        check_name(name, r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
        pairs = self._pairs(parameters, rules, "=")
        return rules.add(f'{quoted(f"{name}(")} {pairs} ")"')

    def answer(self, call: str, opening: str, closing: str, parallel: bool) -> str:
        """Returns the grammar of an answer: one list with all calls."""
        calls = repeated(call, self._between) if parallel else call
        return f"{quoted(opening + '[')} {calls} {quoted(']' + closing)}"

    def _text(self, rules: Rules) -> str:
        text = r"/'([^'\\\n]|\\['\\n])*'/"
        return rules.add(f"{text} & {without(self._forbidden)}", "R")

    def _literal(self, value: Any) -> str:
        return repr(value)

    def _mapping(self, schema: Mapping[str, Any], rules: Rules) -> str:
        return rules.json(schema)
