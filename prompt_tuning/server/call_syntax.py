"""How the answers of models write calls of tools."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a function.

    Attributes:
      name: name of the function.
      arguments: its arguments, an object of JSON.
    """

    name: str
    arguments: str


def json_calls(text: str) -> list[Call] | None:
    """Reads calls that are objects of JSON, or a list of them; None for other text.

    Each has a `name`, and `arguments` or `parameters`. Several may be separated by
    commas or semicolons.
    """
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            call = _call(each)
            if call is None:
                return None
            calls.append(call)
        rest = rest[end:].lstrip(" \n\t\r;,")
    return calls or None


def _call(value: Any) -> Call | None:
    """Reads one call."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _named_calls(text: str) -> list[Call] | None:
    """Reads a name that its arguments follow, or calls as JSON."""
    name = r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)"
    found = re.fullmatch(name, text, re.DOTALL)
    if found is None:
        return json_calls(text)
    return json_calls(f'{{"name": {json.dumps(found[1])}, "arguments": {found[2]}}}')


@dataclasses.dataclass(frozen=True)
class CallSyntax:
    """A syntax of calls.

    Attributes:
      name: name of the syntax.
      opening: text before calls; None if there is none.
      closing: text after calls; None if they end with the answer.
      bare: whether an answer that begins with JSON is calls.
      read: reads the text between; None if it is no call.
      written: further special tokens that are part of calls.
      arguments: name of the arguments in a call as JSON.
      id_length: number of characters of the ids of calls.
    """

    name: str
    opening: str | None = None
    closing: str | None = None
    bare: bool = False
    read: Callable[[str], list[Call] | None] = json_calls
    written: tuple[str, ...] = ()
    arguments: str = "arguments"
    id_length: int = 24

    @property
    def tags(self) -> tuple[str, str] | None:
        """Texts around each call, if there are both."""
        if self.opening is None or self.closing is None:
            return None
        return self.opening, self.closing


HERMES = CallSyntax("Hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallSyntax(
    "Mistral",
    "[TOOL_CALLS]",
    read=_named_calls,
    written=("[ARGS]", "[CALL_ID]"),
    id_length=9,
)
LLAMA = CallSyntax("Llama 3", "<|python_tag|>", bare=True, arguments="parameters")
HARMONY_CALLS = CallSyntax("gpt-oss")
PLAIN = CallSyntax("plain JSON", bare=True)
KNOWN = (HERMES, MISTRAL, LLAMA, HARMONY_CALLS, PLAIN)
OTHERS = re.compile(
    r"<[^\s<>]{0,3}(tool|function)[^\s<>]{0,8}call|<function=|<arg_key>"
)
"""Tags of syntaxes that are not read."""


def syntax_of(template: str) -> CallSyntax | None:
    """Returns the syntax that a chat template asks for; None for one that is not known.

    Templates that do not mention tools have none.
    """
    if "<|channel|>" in template and "functions" in template:
        return HARMONY_CALLS
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        other = "<function=" in template or "<arg_key>" in template
        return None if other else HERMES
    if "ipython" in template and '"parameters"' in template:
        return LLAMA
    describes = '"arguments"' in template or '"parameters"' in template
    if "tools" in template and describes and OTHERS.search(template) is None:
        return PLAIN
    return None
