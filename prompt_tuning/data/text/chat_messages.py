"""Reads lists of chat messages: objects with a role and a content."""

from collections.abc import Mapping, Sequence
from typing import Any

from prompt_tuning.core.errors import InputError, shown

ROLES = ("system", "user", "assistant", "tool")
OTHER_ANSWERS = ("assistant", "gpt", "chatgpt", "model", "bot", "ai")
"""Roles that mean an answer elsewhere, in small letters; here only "assistant" does."""


def read_messages(
    content: Mapping[str, Any], key: str, location: str
) -> tuple[dict[str, Any], ...]:
    """Returns the chat messages under a key of a record: a role and a content each."""
    value = list_of_objects(content, key, location)
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


def list_of_objects(
    content: Mapping[str, Any], key: str, location: str
) -> list[dict[str, Any]]:
    """Returns the objects under a key of a record, at least one."""
    value = content.get(key)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(item, dict) for item in value)
    ):
        return value
    if key not in content:
        raise InputError(
            f"{location}: found the keys {shown(sorted(content))}, expected {key!r}"
        )
    raise InputError(
        f"{location}: {key!r} is {shown(value)}, expected a list of at least one object"
    )
