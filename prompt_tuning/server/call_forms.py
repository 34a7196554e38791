"""Parse tool calls in the forms that models write.

Each reader takes the text between call tags and the argument schemas of the functions,
and returns the calls, or None for any other text. Forms without quotes around texts
need the schemas: `5` may be a text or a number.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

Schemas = Mapping[str, Any]
"""Argument schema of each function, by name."""


class Call(NamedTuple):
    """A function call; its arguments are a JSON object."""

    name: str
    arguments: str


def json_calls(text: str, schemas: Schemas | None = None) -> list[Call] | None:
    """Reads calls that are JSON objects, or a list of them.

    Each has a `name`, and `arguments` or `parameters`. Commas or semicolons may
    separate calls.
    """
    del schemas
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
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], _dumped(arguments))


def _dumped(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def named_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """Reads a name followed by its arguments, or calls as JSON (Mistral)."""
    name = r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*)"
    found = re.fullmatch(name, text, re.DOTALL)
    if found is None:
        return json_calls(text)
    return json_calls(f'{{"name": {json.dumps(found[1])}, "arguments": {found[2]}}}')


def parameter_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """Reads `<function=NAME><parameter=KEY>VALUE</parameter></function>` (Qwen3-Coder).

    Each value is on its own line.
    """
    calls = []
    for name, body in re.findall(
        r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL
    ):
        pairs = re.findall(
            r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|\Z)", body, re.DOTALL
        )
        calls.append(_typed_call(name, pairs, schemas))
    return calls or None


def keyed_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """Reads `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` (GLM)."""
    name, _, rest = text.strip().partition("<arg_key>")
    if not re.fullmatch(r"[\w.-]+\s*", name):
        return None
    pairs = re.findall(
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)",
        f"<arg_key>{rest}",
        re.DOTALL,
    )
    return [_typed_call(name.rstrip(), pairs, schemas)]


def _typed_call(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> Call:
    """Returns a call, with its texts converted by their schemas."""
    properties = schemas.get(name, {}).get("properties", {})
    return Call(
        name, _dumped({key: _typed(text, properties.get(key)) for key, text in pairs})
    )


def _typed(text: str, schema: Any) -> Any:
    """Converts an argument: a text if its schema says so, else JSON if it parses."""
    types = types_of(schema)
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        # Some templates write values as Python does.
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def types_of(schema: Any) -> set[Any]:
    """Returns the types that a schema allows, including those of its alternatives."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {
        x
        for x in (declared if isinstance(declared, list) else [declared])
        if type(x) is str
    }
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            if isinstance(each, dict) and isinstance(each.get("type"), str):
                types.add(each["type"])
    return types


def python_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """Reads a Python list of calls, e.g. `[f(a='x', b=2)]` (LFM2).

    Nothing is evaluated: arguments are literals.
    """
    del schemas
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in nodes] or None
    except (
        LookupError,
        MemoryError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ):
        return None


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {str(each.arg): _literal(each.value) for each in node.keywords}
    return Call(ast.unparse(node.func), _dumped(arguments))


def _literal(node: ast.expr) -> Any:
    """Returns the value of a Python or JSON literal."""
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key or node) for key in node.keys]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


QUOTE = '<|"|>'
"""Token that serves as a quotation mark in Gemma 4's calls."""


def braced_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """Reads `call:NAME{KEY:VALUE}`, with tokens as quotation marks (Gemma 4)."""
    del schemas
    found = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", text, re.DOTALL)
    if found is None:
        return None
    pieces = found[2].split(QUOTE)
    # Every second piece is a text; in the others, keys have no quotes.
    pieces[1::2] = map(json.dumps, pieces[1::2])
    pieces[::2] = (
        re.sub(r"([{,]\s*)([\w.$-]+)\s*:", r'\1"\2":', x) for x in pieces[::2]
    )
    return json_calls(f'{{"name": "{found[1]}", "arguments": {"".join(pieces)}}}')
