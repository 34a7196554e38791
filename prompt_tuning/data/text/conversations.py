"""Formats of records: pairs, chat messages, ShareGPT conversations and Alpaca tasks.

| format | keys of a record |
|---|---|
| `pairs` | a prompt and a completion: two texts, or two lists of chat messages |
| `messages` | `messages`: a list of objects with `role` and `content` |
| `sharegpt` | `conversations`: a list of objects with `from` and `value` |
| `alpaca` | `instruction`, `input` (may be missing or empty) and `output`; `history` |

Both lists may have both kinds of objects, or be JSON, and `conversations` may be called
`conversation`. Dolly's `context` and `response` are read like `input` and `output`. A
conversation may also have `system`, `tools` and `chat_template_kwargs`.
`record_fields` describes what becomes of other keys.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import parse_json
from prompt_tuning.data.text.chat_messages import read_messages
from prompt_tuning.data.text.message_forms import Message, join_parts
from prompt_tuning.data.text.record_fields import (
    HISTORY_KEY,
    SYSTEM_KEY,
    TOOLS_KEY,
    VARIABLES_KEY,
    is_learned,
    refuse_unread,
)
from prompt_tuning.data.text.template_renderer import ChatRecord

RecordFormatName = Literal["pairs", "messages", "sharegpt", "alpaca"]

MESSAGES_KEY = "messages"
CONVERSATION_KEYS = ("conversations", "conversation")
INSTRUCTION_KEY = "instruction"
INPUT_KEYS, OUTPUT_KEYS = ("input", "context"), ("output", "response")
"""Names of the parts of a task: of Alpaca, and of Dolly."""

FORMAT_KEYS: Mapping[RecordFormatName, tuple[str, ...]] = {
    "pairs": (),
    "messages": (MESSAGES_KEY,),
    "sharegpt": CONVERSATION_KEYS,
    "alpaca": (INSTRUCTION_KEY, *INPUT_KEYS, *OUTPUT_KEYS),
}
"""The keys of each format; the user chooses the keys of pairs."""

CONTEXT_KEYS = (SYSTEM_KEY, TOOLS_KEY, VARIABLES_KEY)
"""Keys of a record that a chat template reads besides its messages."""

TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that a record cannot replace."""


def recognize_format(content: Container[str], completion_key: str) -> RecordFormatName:
    """Recognizes the format of a record by its keys; `pairs` if no other one fits.

    A record with the `completion_key` is a pair.
    """
    if completion_key in content:
        return "pairs"
    if MESSAGES_KEY in content:
        return "messages"
    if any(key in content for key in CONVERSATION_KEYS):
        return "sharegpt"
    if INSTRUCTION_KEY in content and any(key in content for key in OUTPUT_KEYS):
        return "alpaca"
    return "pairs"


def conversation_key(content: Container[str]) -> str | None:
    """Returns the key of the chat messages of a record, or None without them."""
    keys = (MESSAGES_KEY, *CONVERSATION_KEYS)
    return next((key for key in keys if key in content), None)


def read_chat_messages(
    content: Mapping[str, Any], key: str, location: str, elsewhere: Collection[str] = ()
) -> ChatRecord:
    """Returns the conversation of a record with chat messages under `key`.

    Something else reads the keys `elsewhere`. A field that nothing reads, but that
    changes what is learned, is refused.
    """
    messages = read_messages(content, key, location)
    return _with_context(messages, content, location, [*elsewhere, key])


def read_sharegpt(
    content: Mapping[str, Any], location: str, elsewhere: Collection[str] = ()
) -> ChatRecord:
    """Returns the conversation of a ShareGPT record; see `read_chat_messages`."""
    key = _named(content, CONVERSATION_KEYS)
    return read_chat_messages(content, key, location, elsewhere)


def read_pair(
    prompt: str,
    completion: str,
    content: Mapping[str, Any],
    location: str,
    elsewhere: Collection[str] = (),
) -> ChatRecord:
    """Returns a prompt and its completion as a conversation, after its history.

    Either text may be empty. For the other arguments see `read_chat_messages`.
    """
    turns = [*_history(content, location), (prompt, completion)]
    messages = [message for turn in turns for message in pair_messages(*turn)]
    return _with_context(messages, content, location, [*elsewhere, HISTORY_KEY])


def has_prompt_messages(content: Mapping[str, Any], prompt_key: str | None) -> bool:
    """Tests whether the prompt of a record is a list of messages, as TRL has it."""
    return has_messages(content.get(prompt_key) if prompt_key is not None else None)


def has_messages(value: Any) -> bool:
    """Tests whether a value is a list of messages, not a text."""
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def read_prompt_messages(
    content: Mapping[str, Any],
    prompt_key: str,
    completion_key: str,
    location: str,
    elsewhere: Collection[str] = (),
) -> ChatRecord:
    """Returns the conversation of a prompt and a completion, both lists of messages.

    TRL has this format. Only the completion, one answer, is learned.
    """
    messages = read_messages(content, prompt_key, location)
    answer = read_messages(content, completion_key, location)
    roles = messages[-1]["role"], *(message["role"] for message in answer)
    if roles[0] == "assistant" or roles[1:] != ("assistant",):
        raise InputError(
            f"{location}: {prompt_key!r} ends with a message of the role "
            f"{roles[0]!r}, and {completion_key!r} has the roles "
            f"{shown(list(roles[1:]))}: "
            "expected a prompt that ends with another role than assistant, and one "
            f"message of the assistant; put other conversations under {MESSAGES_KEY!r}"
        )
    if content.get("label") is False and "label" not in elsewhere:
        raise InputError(
            f"{location}: 'label' is False, so the completion is not to be learned: "
            "leave the record out"
        )
    record = _with_context((*messages, *answer), content, location, elsewhere)
    count = len(record.messages)
    return record._replace(learned=(False,) * (count - 1) + record.learned[-1:])


def read_alpaca(content: Mapping[str, Any], location: str) -> tuple[str, str]:
    """Returns the prompt and the completion of an Alpaca task.

    The prompt is the instruction, followed by the input on a new line, if any.
    """
    prompt = read_task(content, location)
    return prompt, _part(content, OUTPUT_KEYS, location, needed=True)


def read_task(content: Mapping[str, Any], location: str) -> str:
    """Returns the prompt of an Alpaca task; see `read_alpaca`."""
    instruction = _part(content, (INSTRUCTION_KEY,), location, needed=True)
    parts = [instruction, _part(content, INPUT_KEYS, location, needed=False)]
    return "\n".join(part for part in parts if part)


def _part(
    content: Mapping[str, Any], keys: Sequence[str], location: str, *, needed: bool
) -> str:
    """Returns a part of a task, under one of several keys; "" if it may be missing."""
    key = _named(content, keys)
    value = content.get(key)
    if value is None and not needed:
        return ""
    if key not in content:
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
    return value


def pair_messages(prompt: str, completion: str) -> list[Message]:
    """Returns a prompt and a completion as messages; empty ones are left out."""
    messages: list[Message] = []
    if prompt:
        messages.append({"role": "user", "content": prompt})
    if completion:
        messages.append({"role": "assistant", "content": completion})
    return messages


def answers_of(messages: Sequence[Message]) -> ChatRecord:
    """Returns messages as a conversation with all answers learned."""
    learned = tuple(message["role"] == "assistant" for message in messages)
    return ChatRecord(tuple(messages), learned)


def joined_text(message: Message) -> str:
    """Returns the text of a message; its content may be parts or None."""
    content = join_parts(message).get("content")
    return content or ""


def without_answer(record: ChatRecord) -> ChatRecord:
    """Returns a conversation without a known answer at its end."""
    if not record.messages or record.messages[-1]["role"] != "assistant":
        return record
    return record._replace(messages=record.messages[:-1], learned=record.learned[:-1])


def _named(content: Container[str], keys: Sequence[str]) -> str:
    """Returns the first of several names that a record has, or else the first."""
    return next((key for key in keys if key in content), keys[0])


def _with_context(
    messages: Sequence[Message],
    content: Mapping[str, Any],
    location: str,
    elsewhere: Collection[str],
) -> ChatRecord:
    refuse_unread(content, location, [*elsewhere, *CONTEXT_KEYS])
    messages = [*_system_message(messages, content, location), *messages]
    return ChatRecord(
        tuple(messages),
        tuple(is_learned(message, location) for message in messages),
        _parsed(content, TOOLS_KEY, _is_list_of_tools, "a list of objects", location),
        _parsed(content, VARIABLES_KEY, _are_variables, _VARIABLES_FORM, location),
    )


def _system_message(
    messages: Sequence[Message], content: Mapping[str, Any], location: str
) -> list[Message]:
    """Returns the text under `system` as a message, unless it is empty or repeated."""
    system = content.get(SYSTEM_KEY)
    if system is None or system == "":
        return []
    if not isinstance(system, str):
        raise InputError(
            f"{location}: {SYSTEM_KEY!r} is {shown(system)}, expected a text"
        )
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}]
    if first.get("content") == system:
        return []
    raise InputError(
        f"{location}: {SYSTEM_KEY!r} is {shown(system)}, and the first message is "
        f"another system message, {shown(first.get('content'))}: leave one out"
    )


def _history(content: Mapping[str, Any], location: str) -> list[tuple[str, str]]:
    """Returns the earlier turns of a task: pairs of a prompt and its answer."""
    value = content.get(HISTORY_KEY) or []
    turns = parse_json(value, location) if isinstance(value, str) else value
    if not isinstance(turns, list) or not all(
        isinstance(turn, list)
        and len(turn) == 2
        and all(isinstance(text, str) for text in turn)
        for turn in turns
    ):
        raise InputError(
            f"{location}: {HISTORY_KEY!r} is {shown(value)}, expected a list of pairs "
            "[prompt, answer]"
        )
    return [(prompt, answer) for prompt, answer in turns]


_VARIABLES_FORM = (
    "an object with the names and values of variables of the chat template, other "
    f"than {', '.join(TEMPLATE_ARGUMENTS)}"
)


def _is_list_of_tools(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(tool, dict) for tool in value)


def _are_variables(value: Any) -> bool:
    return isinstance(value, dict) and not value.keys() & set(TEMPLATE_ARGUMENTS)


def _parsed(
    content: Mapping[str, Any],
    key: str,
    accepts: Callable[[Any], bool],
    form: str,
    location: str,
) -> Any:
    """Returns the value of a key, which a text may have as JSON, or None."""
    value = content.get(key)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = parse_json(value, f"{location}, {key!r}")
    if not accepts(value):
        raise InputError(f"{location}: {key!r} is {shown(value)}, expected {form}")
    return value
