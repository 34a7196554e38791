"""Messages in the forms that a chat template reads.

Templates differ in what a message has: its content as a text or as a list of parts, the
arguments of a call of a tool as an object or as text, the role `developer` or only
`system`. What a template reads is found by rendering small conversations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with the beginning of the next answer or without."""

PROBE, PROBE_KEY = "the text of a part", "its other key"
"""A text, and a key that a template writes only if it does not read parts."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message for its thoughts, as transformers orders them."""
DEVELOPER = "developer"
FUNCTION_CALL, FUNCTION = "function_call", "function"
"""OpenAI's earlier names: a field for one call, and the role of its result."""
_NO_CONTENT: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
"""Ways in which an answer has no content; the first is that of transformers."""
_ARGUMENTS = {"a name": PROBE}


class MessageForms:
    """The forms of messages that a template reads; `render` may raise anything."""

    def __init__(self, source: str, render: Render):
        self._render = render
        self._has_developer = DEVELOPER in source
        self._has_function_call = FUNCTION_CALL in source
        self._reads_text = self._writes(_user(PROBE))
        part = {"type": "text", "text": PROBE, PROBE_KEY: PROBE_KEY}
        self._reads_parts = self._writes(_user([part]))
        self._calls: tuple[dict[str, Any], set[type]] | None = None

    def __call__(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Returns messages as the template reads them."""
        return [self._convert(message) for message in messages]

    def _convert(self, given: Message) -> dict[str, Any]:
        # As in transformers; templates would write None as text.
        message = {name: value for name, value in given.items() if value is not None}
        thoughts = [message[name] for name in REASONING if name in message]
        if thoughts:
            # As in transformers: both names are for the thoughts.
            names = {"thinking": thoughts[0]}
            message = names | message | {"reasoning_content": thoughts[0]}
        if message["role"] == DEVELOPER and not self._has_developer:
            message["role"] = "system"
        if not self._has_function_call:
            message = _with_tool_calls(message)
        content = message.get("content")
        if isinstance(content, list) and not self._reads_parts:
            message = dict(join_parts(message))
        elif isinstance(content, str) and self._reads_parts and not self._reads_text:
            message["content"] = [{"type": "text", "text": content}]
        return self._convert_calls(message) if message.get("tool_calls") else message

    def _convert_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._calls is None:
            self._calls = self._find_calls()
        content, kinds = self._calls
        calls = [_with_arguments(call, kinds) for call in message["tool_calls"]]
        return content | message | {"tool_calls": calls}

    def _find_calls(self) -> tuple[dict[str, Any], set[type]]:
        """Returns the content of an answer without one, and kinds of arguments."""
        for content in _NO_CONTENT:
            kinds = {kind for kind in (str, dict) if self._writes_call(kind, content)}
            if kinds:
                return content, kinds
        return {}, set()

    def _writes_call(self, kind: type, content: dict[str, Any]) -> bool:
        text = json.dumps(_ARGUMENTS)
        function = {"name": "f", "arguments": text if kind is str else _ARGUMENTS}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        answer = {"role": "assistant", **content, "tool_calls": [call]}
        messages = [*_user("a question"), answer]
        return self._writes(messages, text if kind is str else PROBE)

    def _writes(self, messages: Sequence[Message], text: str = PROBE) -> bool:
        """Tests whether the template writes a text of messages, and no other key."""
        try:
            rendered = self._render(messages, False)
        except Exception:  # a template is a program that can raise anything
            return False
        return text in rendered and PROBE_KEY not in rendered


def _with_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the current names of a call and of a result's role."""
    others = {name: x for name, x in message.items() if name != FUNCTION_CALL}
    if others["role"] == FUNCTION:
        others["role"] = "tool"
    call = message.get(FUNCTION_CALL)
    if not call or others.get("tool_calls"):
        return others
    return others | {"tool_calls": [{"type": "function", "function": call}]}


def _user(content: Any) -> list[Message]:
    return [{"role": "user", "content": content}]


def join_parts(message: Message) -> Message:
    """Returns a message with a text as its content, instead of parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_arguments(call: Any, kinds: set[type]) -> Any:
    """Returns a call of a tool with arguments of a kind that the template reads."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and str not in kinds and dict in kinds:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call  # the template says what it expects
    elif isinstance(arguments, dict) and dict not in kinds and str in kinds:
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
