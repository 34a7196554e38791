"""Grammars of tool calls, in the forms that `call_forms` reads.

They use llguidance's form of Lark. Arguments written as JSON match their schema; for
texts without JSON's quotes, only `enum` and `const` of their schema are enforced.
"""

import abc
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prompt_tuning.decoding.text_constraints import WHITESPACE
from prompt_tuning.server.call_forms import types_of

PLAIN_KEYS = {
    *("type", "properties", "required", "additionalProperties", "title"),
    *("description", "$schema", "$defs", "definitions", "$id", "$comment"),
}
"""Schema keys of an object that constrain nothing but its properties."""


class UnwritableError(Exception):
    """A form of calls cannot express a schema or a name."""


class Rules:
    """The rules of a grammar.

    Args:
      definitions: schemas that others refer to, by name.
    """

    def __init__(self, definitions: Mapping[str, Any]):
        self._definitions = definitions
        self._bodies: dict[str, str] = {}

    def lines(self) -> list[str]:
        """Returns the rules, one per line."""
        return [f"{name}: {body}" for name, body in self._bodies.items()]

    def add(self, body: str, prefix: str = "r", attributes: str = "") -> str:
        """Returns the name of a rule; adds the rule unless there is an equal one.

        Args:
          body: the rule.
          prefix: prefix of its name, capitalized for a regular expression.
          attributes: attributes of the rule, in brackets.
        """
        for name, other in self._bodies.items():
            if other == body:
                return name.partition("[")[0]
        name = f"{prefix}{len(self._bodies)}"
        self._bodies[name + attributes] = body
        return name

    def recursive(self, name: str, body: Callable[[], str]) -> str:
        """Adds a rule that may refer to itself, and returns its name."""
        if name not in self._bodies:
            self._bodies[name] = ""
            self._bodies[name] = body()
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns the name of the rule for JSON of a schema."""
        whole = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
        if "$ref" in json.dumps(schema):
            whole["$defs"] = self._definitions
        return self.add(f"%json {json.dumps(whole)}")

    def text(self, end: str, forbidden: Sequence[str]) -> str:
        """Returns the name of the rule for a text without forbidden ones."""
        body = f"(/(?s:.)*/ & {without(forbidden)}) /{escaped(end)}/"
        return self.add(self.add(body, "R"), attributes="[lazy]")


def without(texts: Sequence[str]) -> str:
    """Returns the expression for any text that contains none of `texts`."""
    return f"~/(?s:.)*({'|'.join(map(escaped, texts))})(?s:.)*/"


def escaped(text: str) -> str:
    """Returns the expression for a literal text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def arguments_of(parameters: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Returns name, schema and whether it is required for each argument.

    Raises:
      UnwritableError: if the schema has more than properties.
    """
    if not parameters.keys() <= PLAIN_KEYS or parameters.get("additionalProperties"):
        raise UnwritableError
    properties = parameters.get("properties", {})
    required = list_of(parameters.get("required", []))
    if not isinstance(properties, dict):
        raise UnwritableError
    names = [*properties, *(name for name in required if name not in properties)]
    return [(name, properties.get(name, {}), name in required) for name in names]


class CallForm(abc.ABC):
    """The form in which a call is written."""

    def __init__(self, between: str = "\n"):
        self._between = between

    @abc.abstractmethod
    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""

    def answer(self, call: str, opening: str, closing: str, parallel: bool) -> str:
        """Returns the grammar of an answer that consists of calls.

        Args:
          call: grammar of a call.
          opening: text before a call, or "".
          closing: text after a call, or "".
          parallel: whether to allow more than one.
        """
        tagged = f"{quoted(opening)} {call} {quoted(closing)}"
        return repeated(tagged, self._between) if parallel else tagged


def repeated(item: str, between: str) -> str:
    """Returns the grammar of one or more items."""
    return f"({item}) ({quoted(between)} {item})*"


def quoted(text: str) -> str:
    """Returns a text as a quoted literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def check_name(name: str, pattern: str) -> None:
    """Checks that a name matches a pattern of the syntax."""
    if re.fullmatch(pattern, name) is None:
        raise UnwritableError


class JsonForm(CallForm):
    """A JSON object with the name and the arguments.

    Args:
      arguments: key of the arguments.
      space: text before and after the object.
    """

    def __init__(self, arguments: str = "arguments", space: str = ""):
        super().__init__()
        self._arguments, self._space = arguments, quoted(space)

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, self._arguments: parameters},
            "required": ["name", self._arguments],
            "additionalProperties": False,
        }
        return f"{self._space} {rules.json(schema)} {self._space}"


class OneJsonForm(JsonForm):
    """The same without tags, so that there can be only one call."""

    def answer(self, call: str, opening: str, closing: str, parallel: bool) -> str:
        """Returns the grammar of an answer."""
        return call


class NamedForm(JsonForm):
    """Mistral's form: the name, then the arguments as JSON; or a list of `JsonForm`."""

    def __init__(self):
        super().__init__()
        self._between = ""

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        named = f'{quoted(name)} "[ARGS]"? {rules.json(parameters)}'
        return rules.add(f'{named} | "[" {super().call(name, parameters, rules)} "]"')


class HarmonyForm(CallForm):
    """gpt-oss's form: a message to the function, with either order of its header."""

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        to, channel = f" to=functions.{name}", "<|channel|>commentary"
        headers = f"{to}{channel} json", f"{channel}{to} json"
        either = " | ".join(map(quoted, headers))
        return rules.add(f'({either}) "<|message|>" {rules.json(parameters)}')

    def answer(self, call: str, opening: str, closing: str, parallel: bool) -> str:
        """Returns the grammar of an answer; its end token ends the call."""
        return call


class ParameterForm(CallForm):
    """Arguments between tags: texts without quotes, everything else as JSON.

    Args:
      opening: text before the arguments, with a placeholder for the name.
      closing: text after the arguments.
      before: text before an argument, with a placeholder for its name.
      after: text after an argument.
      forbidden: texts that must not occur in a text.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        before: str,
        after: str,
        forbidden: Sequence[str],
    ):
        super().__init__()
        self._opening, self._closing = opening, closing
        self._before, self._after, self._forbidden = before, after, forbidden

    def call(self, name: str, parameters: Mapping[str, Any], rules: Rules) -> str:
        """Returns the grammar of a call."""
        parts = [quoted(self._opening.format(name))]
        for key, schema, required in arguments_of(parameters):
            check_name(key, r"[^<>\n]+")
            opening = quoted(self._before.format(key))
            part = f"{opening} {self._value(schema, rules)}"
            parts.append(part if required else f"({part})?")
        return rules.add(" ".join([*parts, quoted(self._closing)]))

    def _value(self, schema: Any, rules: Rules) -> str:
        after = quoted(self._after)
        if types_of(schema) == {"boolean"}:
            # Some templates write them as Python does.
            return f'("true" | "false" | "True" | "False") {after}'
        if "string" not in types_of(schema):
            json_schema = schema if isinstance(schema, dict) else {}
            return f"{rules.json(json_schema)} {after}"
        if not (chosen := choices_of(schema)):
            return rules.text(self._after, self._forbidden)
        texts = [x if isinstance(x, str) else json.dumps(x) for x in chosen]
        return f"({' | '.join(map(quoted, texts))}) {after}"


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the values that a schema lists, if it lists all."""
    return [schema["const"]] if "const" in schema else list_of(schema.get("enum", []))


def list_of(value: Any) -> list[Any]:
    """Returns a value of a schema if it is a list."""
    if not isinstance(value, list):
        raise UnwritableError
    return value
