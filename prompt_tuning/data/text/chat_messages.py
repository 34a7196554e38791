"""Reads lists of chat messages: objects with a role and a content.

ShareGPT's objects with `from` and `value` are read as such messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import parse_json

ROLES = ("system", "user", "assistant", "tool")
OTHER_ANSWERS = ("assistant", "gpt", "chatgpt", "model", "bot", "ai")
"""Roles that mean an answer elsewhere, in small letters; here only "assistant" does."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FUNCTION_CALL = "function_call"
"""Sender of an answer that calls functions, the JSON of a call or of a list of them."""


def read_messages(
    content: Mapping[str, Any], key: str, location: str
) -> tuple[dict[str, Any], ...]:
    """Returns the chat messages under a key of a record: a role and a content each.

    A list may also be JSON, as in a cell of a table.
    """
    value = _list_of_objects(content, key, location)
    value = [_with_role(message, key, location) for message in value]
    for message in value:
        role = message.get("role")
        text = message.get("content")
        if not isinstance(role, str) or not (
            isinstance(text, str | list) or _calls_tools(message)
        ):
            raise InputError(
                f"{location}: {key!r} must be a list of objects, each with the strings "
                f"'role' ({', '.join(ROLES)}) and 'content'; found {shown(message)}"
            )
        if role != "assistant" and role.lower() in OTHER_ANSWERS:
            raise InputError(
                f"{location}: the role of a message is {shown(role)}, but answers, "
                "which are learned, have the role 'assistant': rename it"
            )
        if isinstance(text, list):
            _check_parts(text, location)
    return tuple(value)


def _calls_tools(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls") or message.get("function_call")
    return message.get("role") == "assistant" and bool(calls)


def _check_parts(parts: Sequence[Any], location: str) -> None:
    """Refuses a content with parts other than text."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InputError(
                f"{location}: 'content' has the part {shown(part)}, expected parts of "
                "text alone, such as {'type': 'text', 'text': 'hello'}: images, sound "
                "and others are not read"
            )


def _with_role(message: dict[str, Any], key: str, location: str) -> dict[str, Any]:
    """Returns a message of ShareGPT's form in the other one, and others unchanged."""
    if "role" in message or "from" not in message:
        return message
    sender, text = message["from"], message.get("value")
    others = {key: x for key, x in message.items() if key not in ("from", "value")}
    if sender == FUNCTION_CALL and isinstance(text, str):
        return {"role": "assistant", "tool_calls": _calls(text, location), **others}
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None or not isinstance(text, str):
        senders = ", ".join((*SHAREGPT_ROLES, FUNCTION_CALL))
        raise InputError(
            f"{location}: {key!r} must be a list of objects, each with "
            f"the strings 'from' ({senders}) and 'value'; found {shown(message)}"
        )
    return {"role": role, "content": text, **others}


def _calls(text: str, location: str) -> list[dict[str, Any]]:
    """Returns the calls in the JSON of one call, or of a list of them."""
    value = parse_json(text, f"{location}, {FUNCTION_CALL!r}")
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not {"name", "arguments"} <= call.keys():
            raise InputError(
                f"{location}: a message of {FUNCTION_CALL!r} has the call "
                f"{shown(call)}, expected an object with 'name' and 'arguments'"
            )
    return [{"type": "function", "function": call} for call in calls]


def _list_of_objects(
    content: Mapping[str, Any], key: str, location: str
) -> list[dict[str, Any]]:
    """Returns the objects under a key of a record, at least one."""
    if key not in content:
        raise InputError(
            f"{location}: found the keys {shown(sorted(content))}, expected {key!r}"
        )
    value = content[key]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, f"{location}, {key!r}")
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) for item in value)
    ):
        return value
    raise InputError(
        f"{location}: {key!r} is {shown(value)}, expected a list of at least one object"
    )
