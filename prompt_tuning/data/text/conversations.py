"""Formats of records: pairs, chat messages, ShareGPT conversations and Alpaca tasks.

| format | keys of a record |
|---|---|
| `pairs` | a prompt and a completion |
| `messages` | `messages`: a list of objects with `role` and `content` |
| `sharegpt` | `conversations`: a list of objects with `from` and `value`; `system` |
| `alpaca` | `instruction`, `input` (may be missing or empty) and `output` |
"""

from collections.abc import Container, Mapping
from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.text.template_renderer import Message

RecordFormatName = Literal["pairs", "messages", "sharegpt", "alpaca"]

MESSAGES_KEY = "messages"
CONVERSATIONS_KEY = "conversations"
INSTRUCTION_KEY, INPUT_KEY, OUTPUT_KEY = "instruction", "input", "output"
SYSTEM_KEY = "system"

ROLES = ("system", "user", "assistant", "tool")
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


def recognize_format(content: Container[str], completion_key: str) -> RecordFormatName:
    """Recognizes the format of a record by its keys; `pairs` if no other one fits.

    Args:
      content: the record, or the names of its keys.
      completion_key: key of a pair's completion; a record that has it is a pair.
    """
    if completion_key in content:
        return "pairs"
    if MESSAGES_KEY in content:
        return "messages"
    if CONVERSATIONS_KEY in content:
        return "sharegpt"
    if INSTRUCTION_KEY in content and OUTPUT_KEY in content:
        return "alpaca"
    return "pairs"


def read_messages(
    content: Mapping[str, Any], key: str, location: str
) -> tuple[dict[str, Any], ...]:
    """Returns the chat messages of a record.

    Raises:
      InputError: if there are none, or one is not an object with a role and a content.
    """
    value = _list_of_objects(content, key, location)
    for message in value:
        if not isinstance(message.get("role"), str) or not isinstance(
            message.get("content"), str
        ):
            raise InputError(
                f"{location}: {key!r} must be a list of objects, each with the strings "
                f"'role' ({', '.join(ROLES)}) and 'content'; found {shown(message)}"
            )
    return tuple(value)


def read_sharegpt(
    content: Mapping[str, Any], location: str
) -> tuple[dict[str, Any], ...]:
    """Returns the messages of a ShareGPT conversation.

    A text under `system` becomes the first message.

    Raises:
      InputError: if there are none, or one is not an object with a known `from` and a
        text as its `value`.
    """
    value = _list_of_objects(content, CONVERSATIONS_KEY, location)
    if all("role" in message for message in value):
        messages = list(read_messages(content, CONVERSATIONS_KEY, location))
    else:
        messages = [_sharegpt_message(message, location) for message in value]
    system = content.get(SYSTEM_KEY)
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def _sharegpt_message(message: Mapping[str, Any], location: str) -> dict[str, Any]:
    sender, text = message.get("from"), message.get("value")
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None or not isinstance(text, str):
        raise InputError(
            f"{location}: {CONVERSATIONS_KEY!r} must be a list of objects, each with "
            f"the strings 'from' ({', '.join(SHAREGPT_ROLES)}) and 'value'; found "
            f"{shown(message)}"
        )
    return {"role": role, "content": text}


def read_alpaca(content: Mapping[str, Any], location: str) -> tuple[str, str]:
    """Returns the prompt and the completion of an Alpaca task.

    The prompt is the instruction, followed by the input on a new line, if there is one.

    Raises:
      InputError: if one of them is missing, or is not a text.
    """
    texts = {}
    for key in (INSTRUCTION_KEY, INPUT_KEY, OUTPUT_KEY):
        value = content.get(key)
        if value is None and key == INPUT_KEY:
            value = ""
        if key not in content and key != INPUT_KEY:
            raise InputError(
                f"{location}: found the keys {shown(sorted(content))}, expected "
                f"{key!r}: a line of the format alpaca has the keys instruction, input "
                "and output"
            )
        if not isinstance(value, str):
            raise InputError(
                f"{location}: {key!r} is {shown(value)}, expected a text: a line of "
                "the format alpaca has the keys instruction, input and output"
            )
        texts[key] = value
    parts = [texts[INSTRUCTION_KEY], texts[INPUT_KEY]]
    return "\n".join(part for part in parts if part), texts[OUTPUT_KEY]


def pair_messages(prompt: str, completion: str) -> list[Message]:
    """Returns a prompt and a completion as messages; empty ones are left out."""
    messages: list[Message] = []
    if prompt:
        messages.append({"role": "user", "content": prompt})
    if completion:
        messages.append({"role": "assistant", "content": completion})
    return messages


def _list_of_objects(
    content: Mapping[str, Any], key: str, location: str
) -> list[dict[str, Any]]:
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
