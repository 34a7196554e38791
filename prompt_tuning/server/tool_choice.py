"""Tools of requests, and whether their answers must call one."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject, as_object
from prompt_tuning.server.call_grammars import Rules, escaped
from prompt_tuning.server.call_syntax import CallSyntax
from prompt_tuning.server.server_limits import MAXIMUM_TOOLS

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
MODES = ("none", "auto", "required")


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """The tools that an answer may call.

    `functions` has the argument schema of each function that may be called. `required`
    tells whether the answer must call one, and `parallel` whether it may call more than
    one.
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
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = as_object(choice, "tool_choice").nested("allowed_tools")
        functions = {
            name: functions[name]
            for name in (
                _named(as_object(value, "an allowed tool"), functions)
                for value in allowed.sequence("tools")
            )
        }
        choice = allowed.text("mode")
        tools = [x for x in tools if x["function"]["name"] in functions]
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
    """Returns the name and argument schema of a tool's function."""
    tool = as_object(value, f"tool {number}")
    if tool.text("type", "function") != "function":
        tool.refuse("type", "function")
    function = tool.nested("function")
    name = function.text("name")
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        function.refuse("name", "1 to 64 letters, digits, _, - and .")
    schema = function.nested("parameters", {}).values
    return name, {"type": "object", **_resolved(schema)}


def _resolved(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with references to its own parts replaced in its properties.

    The types of properties decide how they are read.
    """
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return dict(schema)
    resolved = {}
    for name, value in properties.items():
        reference = value.get("$ref") if isinstance(value, dict) else None
        start, *keys = str(reference).split("/")
        found: Any = schema if start == "#" and keys else None
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        resolved[name] = found if isinstance(found, dict) else value
    return {**schema, "properties": resolved}


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

    `thinking` are tags around reasoning that may precede the calls, and may have been
    opened before the answer.

    Raises:
      UnwritableError: if the syntax cannot express calls of one of the functions.
    """
    definitions: dict[str, Any] = {}
    rules, calls = Rules(definitions), []
    for number, (name, parameters) in enumerate(choice.functions.items()):
        own, rest = _apart(parameters, number)
        definitions |= own
        calls.append(syntax.form.call(name, rest, rules))
    answer = syntax.form.answer(
        f"({' | '.join(calls)})",
        syntax.opening or "",
        syntax.closing or "",
        choice.parallel,
    )
    first, lines = "", rules.lines()
    if thinking is not None:
        opening, after = map(escaped, thinking)
        first = "thought space " if opened else "(thought space)? "
        lines.append(f"thought[lazy]: /{'' if opened else opening}(?s:.)*{after}/")
        lines.append(r"space: /\s{0,8}/")
    return "\n".join([f"start: {first}{answer}", *lines])


def _apart(parameters: Mapping[str, Any], number: int) -> tuple[dict[str, Any], Any]:
    """Splits a schema into its definitions, with numbered names, and the rest."""
    definitions: dict[str, Any] = {}
    for name in ("definitions", "$defs"):
        definitions |= parameters.get(name) or {}
    rest = {x: parameters[x] for x in parameters if x not in ("definitions", "$defs")}
    renamed = {f"{number}.{name}": _moved(x, number) for name, x in definitions.items()}
    return renamed, _moved(rest, number)


def _moved(schema: Any, number: int) -> Any:
    """Returns a schema whose references point to the numbered definitions."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, number) for name, value in schema.items()}
    if isinstance(reference := moved.get("$ref"), str):
        place = rf"#/$defs/{number}."
        moved["$ref"] = re.sub(r"#/(\$defs|definitions)/", lambda _: place, reference)
    return moved
