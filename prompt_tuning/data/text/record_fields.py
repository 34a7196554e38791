"""Fields of records and of messages that change what is learned.

A field is read, refused by its name, or harmless, e.g. an id that only describes the
record. A message may have more fields that only its template knows, so the template
gets them all.
"""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from prompt_tuning.core.errors import InputError, shown

SYSTEM_KEY, HISTORY_KEY = "system", "history"
TOOLS_KEY, VARIABLES_KEY = "tools", "chat_template_kwargs"

LEARNED_FLAGS = ("weight", "train", "training", "trainable", "learn", "loss")
"""Fields of a message that state whether it is learned: 1 or true, 0 or false."""

_TEXT_ONLY = "only text is read, so that something would be missing"
_FLAG = "state by 'weight', 0 or 1, of each message whether it is learned"
_TO_TOOLS = "put the tools under 'tools', as OpenAI does now"
_TO_SYSTEM = "name it 'system'"
_TWICE = "the record has its texts under other keys too, and one of both is read"
_NEEDS_CHAT = "only a chat template renders it, and this text has none"

_MEDIA = {
    name: _TEXT_ONLY
    for kind in ("image", "video", "audio")
    for name in (kind, f"{kind}s")
}

REFUSED_IN_MESSAGES: Mapping[str, str] = _MEDIA | {
    "weights": _FLAG,
    "loss_weight": _FLAG,
    "loss_scale": _FLAG,
    "loss_mask": _FLAG,
    "mask": _FLAG,
    "masked": _FLAG,
    "train_detail": _FLAG,
    "training_detail": _FLAG,
}
"""Fields of a message that are not read and change what is learned, and the advice."""

_RECORD_WEIGHT = (
    "name the weight of a record by DataSource.example_weight_key (prepare: "
    "--weight_key)"
)

WEIGHTS: Mapping[str, str] = {
    "weights": _FLAG,
    "loss_weights": _FLAG,
    "loss_mask": _FLAG,
    "mask": _FLAG,
    "weight": _RECORD_WEIGHT,
    "loss_weight": _RECORD_WEIGHT,
    "train": "leave out the records that are not to be learned",
}
"""Fields of a record that set what is learned of it, and change none of its texts."""

REFUSED: Mapping[str, str] = (
    _MEDIA
    | WEIGHTS
    | {
        SYSTEM_KEY: _NEEDS_CHAT,
        HISTORY_KEY: "only a chat template renders it, after tasks and pairs",
        TOOLS_KEY: _NEEDS_CHAT,
        VARIABLES_KEY: _NEEDS_CHAT,
        "functions": _TO_TOOLS,
        "function_call": _TO_TOOLS,
        "documents": f"put it into {VARIABLES_KEY!r}, if the template uses it",
        "system_prompt": _TO_SYSTEM,
        "system_message": _TO_SYSTEM,
        "messages": _TWICE,
        "conversations": _TWICE,
        "conversation": _TWICE,
    }
)
"""Fields of a record that change what is learned, and why or when they are not read."""

# fmt: off
HARMLESS: frozenset[str] = frozenset({
    "text", "prompt", "chosen", "rejected", "score_chosen", "score_rejected",
    "id", "idx", "index", "uuid", "hash", "sha", "conversation_id", "dialogue_id",
    "message_id", "question_id", "prompt_id", "example_id", "source", "dataset",
    "data_source", "origin", "url", "link", "license", "author", "user", "user_id",
    "model", "model_name", "category", "categories", "topic", "task", "task_name",
    "domain", "subset", "split", "language", "lang", "locale", "tag", "tags", "label",
    "labels", "title", "description", "meta", "metadata", "info", "extra",
    "difficulty", "quality", "score", "scores", "rating", "reward", "rank", "turn",
    "turns", "num_turns", "length", "num_tokens", "n_tokens", "token_count", "date",
    "time", "timestamp", "created", "created_at", "updated_at", "version",
    "parallel_tool_calls", "redacted", "toxic", "__index_level_0__",
})
# fmt: on
"""Names of fields of a record that describe it, and are left out without a word."""

_SAYS_NOTHING = (None, "", [], {})


def warn_of_unread(
    content: Mapping[str, Any], location: str, read: Collection[str]
) -> None:
    """Warns of unread fields of a record with an unknown meaning."""
    known = {*read, *REFUSED, *HARMLESS}
    names = sorted(name for name in content if name not in known)
    names = [name for name in names if content[name] not in _SAYS_NOTHING]
    if names:
        warnings.warn(f"{location}: the keys {shown(names)} are not read", stacklevel=2)


def refuse_unread(
    content: Mapping[str, Any], location: str, read: Collection[str] = ()
) -> None:
    """Refuses a record with an unread field that would change what is learned."""
    for name in sorted(content.keys() & REFUSED.keys()):
        value = content[name]
        if name in read or value in _SAYS_NOTHING or _is_one(name, value):
            continue
        raise InputError(
            f"{location}: {name!r} is {shown(value)}, which is not read and would "
            f"change what is learned: {REFUSED[name]}; or leave the key out, or "
            "rename it"
        )


def _is_one(name: str, value: Any) -> bool:
    """Tests whether a value is the weight that everything has anyway."""
    return name in ("weight", "loss_weight", "train") and value in (1, "1", "1.0")


def is_learned(message: Mapping[str, Any], location: str) -> bool:
    """Tests whether a message is a learned answer, by its role and flags.

    An answer without a content is not, unless it calls a tool or the like: only its end
    could be learned. Flags must be 0 or 1, and agree.
    """
    for name in sorted(message.keys() & REFUSED_IN_MESSAGES.keys()):
        if message[name] not in _SAYS_NOTHING:
            raise InputError(
                f"{location}: {name!r} of a message is {shown(message[name])}, which "
                f"is not read and would change what is learned: "
                f"{REFUSED_IN_MESSAGES[name]}; or leave the key out"
            )
    is_answer = message["role"] == "assistant"
    flags = {x: message[x] for x in LEARNED_FLAGS if message.get(x) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise InputError(
                f"{location}: {name!r} of a message is {shown(flag)}, expected 0 or 1: "
                "an answer is learned or not"
            )
        if flag and not is_answer:
            raise InputError(
                f"{location}: {name!r} of a message of the role "
                f"{shown(message['role'])} is {shown(flag)}, but only answers (of the "
                "role assistant) are learned: leave the key out"
            )
    if len({bool(flag) for flag in flags.values()}) > 1:
        raise InputError(
            f"{location}: a message has {shown(flags)}, expected equal values"
        )
    return is_answer and all(flags.values()) and _says_something(message)


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        content = any(part.get("text") for part in content if isinstance(part, dict))
    others = message.keys() - {"role", "content", "name", *LEARNED_FLAGS}
    return bool(content) or any(message[name] for name in others)
