"""The syntax of answers to a conversation, from its chat template, and their reader."""

import contextlib
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer
from prompt_tuning.decoding.request import Completion
from prompt_tuning.server import call_syntax
from prompt_tuning.server.answer_parts import (
    HARMONY,
    AnswerReader,
    HarmonyReader,
    Part,
    TaggedReader,
)
from prompt_tuning.server.call_forms import Schemas
from prompt_tuning.server.call_grammars import UnwritableError
from prompt_tuning.server.tool_choice import ToolChoice, calls_grammar

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around reasoning; a chat template with thinking writes one of these pairs."""
TAIL = 8
"""Number of last tokens of a conversation that may open the reasoning."""


@dataclasses.dataclass(frozen=True)
class ChatSyntax:
    """How an answer is written.

    Attributes:
      thinking: tags around its reasoning; None without reasoning.
      opened: whether the conversation ends with the tag that opens the reasoning.
      calls: syntax of its calls; None if it may not call anything.
      schemas: argument schemas of the functions that it may call.
      harmony: whether it consists of gpt-oss's messages.
      grammar: grammar that it must match because a call is required; or None.
    """

    thinking: tuple[str, str] | None = None
    opened: bool = False
    calls: call_syntax.CallSyntax | None = None
    schemas: Schemas = dataclasses.field(default_factory=dict)
    harmony: bool = False
    grammar: str | None = None

    @property
    def plain(self) -> bool:
        """Whether the whole text is content."""
        return self.thinking is None and self.calls is None and not self.harmony

    def reader(self) -> AnswerReader:
        """Returns a reader of one answer."""
        if self.harmony:
            return HarmonyReader(calls=self.calls is not None)
        return TaggedReader(
            self.thinking, opened=self.opened, syntax=self.calls, schemas=self.schemas
        )

    def written(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Returns the special tokens that structure the answer, with their texts."""
        texts = [*(self.thinking or ()), *(HARMONY if self.harmony else ())]
        if self.calls is not None:
            tags = (self.calls.opening, self.calls.closing, *self.calls.written)
            texts += filter(None, tags)
        return special_tokens(tokenizer, texts)


def special_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[int, str]:
    """Returns the special tokens, which decoding leaves out, among some texts."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    ids = {text: tokenizer.tokenizer.token_to_id(text) for text in texts}
    return {
        id: text
        for text, id in ids.items()
        if id is not None and not tokenizer.decode([id])
    }


def find_syntax(
    template: str, tokenizer: Tokenizer, ids: Sequence[int], choice: ToolChoice | None
) -> ChatSyntax:
    """Returns the syntax of the next answer.

    `ids` are the conversation; without `choice` the answer may not call a tool.

    Raises:
      InputError: if it may call tools, and the template uses an unsupported syntax for
        calls.
    """
    calls = None if choice is None else call_syntax.syntax_of(template)
    harmony = "<|channel|>" in template and "<|message|>" in template
    thinking = next((x for x in THINKING if x[0] in template), None)
    if harmony or calls is call_syntax.HARMONY_CALLS:
        thinking = None
    opened = thinking is not None and _opens(tokenizer, ids, thinking)
    if choice is None:
        return ChatSyntax(thinking, opened, harmony=harmony)
    syntax = ChatSyntax(thinking, opened, calls, choice.functions, harmony)
    if choice.required:
        return _with_required_call(syntax, choice)
    if calls is None:
        names = ", ".join(each.name for each in call_syntax.KNOWN)
        raise InputError(
            "tools need a chat template that asks for calls in a known syntax "
            f"({names}), and this one does not: require a call by tool_choice, which "
            "is then written as JSON, or leave out tools"
        )
    return syntax


def _with_required_call(syntax: ChatSyntax, choice: ToolChoice) -> ChatSyntax:
    """Returns the syntax of an answer that must call a tool.

    It is JSON if the template's own syntax is unknown or cannot express the arguments.
    """
    thinking, opened = syntax.thinking, syntax.opened
    if syntax.calls is not None:
        with contextlib.suppress(UnwritableError):
            grammar = calls_grammar(choice, syntax.calls, thinking, opened=opened)
            return dataclasses.replace(syntax, grammar=grammar)
    grammar = calls_grammar(choice, call_syntax.PLAIN, thinking, opened=opened)
    return dataclasses.replace(
        syntax, calls=call_syntax.PLAIN, harmony=False, grammar=grammar
    )


def _opens(tokenizer: Tokenizer, ids: Sequence[int], thinking: tuple[str, str]) -> bool:
    """Whether a conversation ends with the opening tag, optionally followed by space.

    Special tokens are read from their ids, because decoding leaves them out.
    """
    opening, _ = thinking
    special = special_tokens(tokenizer, thinking)
    tail = list(ids[-TAIL:])
    if tokenizer.decode(tail).rstrip().endswith(opening):
        return True
    last = [id for id in tail if id in special or tokenizer.decode([id]).strip()]
    return bool(last) and special.get(last[-1]) == opening


FIELDS = {"content": "content", "reasoning": "reasoning_content"}


class ChatMessage:
    """An answer's message in OpenAI's form, which arrives piece by piece."""

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
