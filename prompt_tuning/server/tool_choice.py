"""Tools of requests, and whether their answers must call one."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject, as_object
from prompt_tuning.decoding.text_constraints import WHITESPACE
from prompt_tuning.server.call_syntax import CallSyntax
from prompt_tuning.server.server_limits import MAXIMUM_TOOLS

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
MODES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call.

    Attributes:
      tools: the tools, as chat templates read them.
      functions: schema of the arguments of each function that may be called, by name.
      required: whether the answer must call one.
      parallel: whether it may call several.
    """

    tools: list[dict[str, Any]]
    functions: Mapping[str, Any]
    required: bool
    parallel: bool


def read_tool_choice(body: JsonObject) -> ToolChoice | None:
    """Reads the tools of a request; None if its answer may call none.

    Raises:
      InputError: if a field cannot be used.
    """
    tools = body.sequence("tools", [])
    if len(tools) > MAXIMUM_TOOLS:
        raise InputError(
            f"tools has {len(tools):,} entries, expected at most {MAXIMUM_TOOLS}"
        )
    functions = dict(_function(value, n) for n, value in enumerate(tools, 1))
    parallel = body.flag("parallel_tool_calls", True)
    choice = body.value("tool_choice", "auto")
    if isinstance(choice, dict):
        name = _named(as_object(choice, "tool_choice"), functions)
        return ToolChoice(tools, {name: functions[name]}, True, False)
    if choice not in MODES:
        body.refuse("tool_choice", f"one of {', '.join(MODES)}, or a function's name")
    if choice == "required" and not tools:
        raise InputError("tool_choice is required, and there are no tools: send tools")
    if choice == "none" or not tools:
        return None
    return ToolChoice(tools, functions, choice == "required", parallel)


def _function(value: Any, number: int) -> tuple[str, Any]:
    """Returns the name and the schema of the arguments of a tool's function."""
    tool = as_object(value, f"tool {number}")
    if tool.text("type", "function") != "function":
        tool.refuse("type", "function")
    function = tool.nested("function")
    name = function.text("name")
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        function.refuse("name", "1 to 64 letters, digits, _, - and .")
    schema = function.nested("parameters", {}).values
    return name, {"type": "object", **schema}


def _named(choice: JsonObject, functions: Mapping[str, Any]) -> str:
    if choice.text("type", "function") != "function":
        choice.refuse("type", "function")
    name = choice.nested("function").text("name")
    if name not in functions:
        raise InputError(
            f"tool_choice names {shown(name)}, expected one of the tools: "
            f"{', '.join(functions) or 'there are none'}"
        )
    return name


def calls_grammar(
    choice: ToolChoice,
    syntax: CallSyntax,
    thinking: tuple[str, str] | None,
    *,
    opened: bool,
) -> str:
    """Returns the grammar of an answer that calls a tool.

    Args:
      choice: the tools.
      syntax: syntax of calls; without tags around them the answer is one call.
      thinking: tags around reasoning that may come before; None for none.
      opened: whether the reasoning was opened before the answer.
    """
    calls, definitions = [], {}
    for number, (name, parameters) in enumerate(choice.functions.items()):
        own, rest = _apart(parameters, number)
        calls.append(_call_schema(name, syntax.arguments, rest))
        definitions |= own
    schema = {
        "x-guidance": {"whitespace_pattern": WHITESPACE},
        "$defs": definitions,
        "anyOf": calls,
    }
    rules = [f"object: %json {json.dumps(schema)}", r"space: /\s{0,8}/"]
    call, first = "object", ""
    if syntax.tags is not None:
        opening, closing = map(json.dumps, syntax.tags)
        rules.append(f'tagged: {opening} "\\n" object "\\n" {closing}')
        call = 'tagged ("\\n" tagged)*' if choice.parallel else "tagged"
    if thinking is not None:
        before, after = map(re.escape, thinking)
        end = after.replace("/", r"\/")
        first = "thought space " if opened else "(thought space)? "
        rules.append(f"thought[lazy]: /{'' if opened else before}(?s:.)*{end}/")
    return "\n".join([f"start: {first}{call}", *rules])


def _call_schema(name: str, key: str, parameters: Any) -> dict[str, Any]:
    """Returns the schema of a call, an object of JSON."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _apart(parameters: Mapping[str, Any], number: int) -> tuple[dict[str, Any], Any]:
    """Returns the definitions of a schema by names with a number, and the rest."""
    definitions: dict[str, Any] = {}
    for name in ("definitions", "$defs"):
        definitions |= parameters.get(name) or {}
    rest = {x: parameters[x] for x in parameters if x not in ("definitions", "$defs")}
    own = {f"{number}.{name}": _moved(x, number) for name, x in definitions.items()}
    return own, _moved(rest, number)


def _moved(schema: Any, number: int) -> Any:
    """Returns a schema whose references are to definitions with a number."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, number) for name, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str):
        place = rf"#/$defs/{number}."
        moved["$ref"] = re.sub(r"#/(\$defs|definitions)/", lambda _: place, reference)
    return moved
