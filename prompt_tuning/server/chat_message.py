"""An answer's message in OpenAI's form, whole and as deltas."""

import secrets
from typing import Any

from prompt_tuning.decoding.request import Completion
from prompt_tuning.server.answer_parts import Part
from prompt_tuning.server.chat_syntax import ChatSyntax

FIELDS = {"content": "content", "reasoning": "reasoning_content"}


class ChatMessage:
    """An answer that arrives piece by piece."""

    def __init__(self, syntax: ChatSyntax):
        self._syntax = syntax
        self._reader = None if syntax.plain else syntax.reader()
        self._texts: dict[str, str] = {}
        self._calls: list[dict[str, Any]] = []

    def add(self, text: str, *, ends: bool) -> dict[str, Any]:
        """Adds text, and returns a delta with the parts that are now final.

        `ends` marks the last piece.
        """
        delta: dict[str, Any] = {}
        for part in self._parts(text, ends):
            if part.kind == "call":
                call = self._call(part)
                entry = {"index": len(self._calls), **call}
                self._calls.append(call)
                delta.setdefault("tool_calls", []).append(entry)
                continue
            name = FIELDS[part.kind]
            self._texts[name] = self._texts.get(name, "") + part.text
            delta[name] = delta.get(name, "") + part.text
        return delta

    def whole(self) -> dict[str, Any]:
        """Returns the message once it has ended."""
        content = None if self._calls else ""
        message = {"role": "assistant", "content": content, "refusal": None}
        message |= self._texts
        return message | ({"tool_calls": self._calls} if self._calls else {})

    def reason(self, completion: Completion) -> dict[str, str]:
        """Returns the finish reason, if it differs from that of the text."""
        called = self._calls and completion.reason == "stop"
        return {"finish_reason": "tool_calls"} if called else {}

    def _parts(self, text: str, ends: bool) -> list[Part]:
        if self._reader is None:
            return [Part("content", text)] if text else []
        return self._reader.feed(text) + (self._reader.finish() if ends else [])

    def _call(self, part: Part) -> dict[str, Any]:
        syntax = self._syntax.calls
        length = 24 if syntax is None else syntax.id_length
        name = secrets.token_hex(length)[:length]
        return {
            "id": name if length < 24 else f"call_{name}",
            "type": "function",
            "function": {"name": part.name, "arguments": part.text},
        }
