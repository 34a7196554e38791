"""Split an answer into content, reasoning and tool calls.

A reader gets the text of an answer piece by piece, and returns the parts that can no
longer change. The result does not depend on how the text is cut into pieces.
"""

import abc
import re
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from prompt_tuning.server.call_forms import Schemas, json_calls
from prompt_tuning.server.call_syntax import CallSyntax

Kind = Literal["content", "reasoning", "call"]


class Part(NamedTuple):
    """A part of an answer.

    The text of a call is its arguments as JSON, and `name` the called function.
    """

    kind: Kind
    text: str
    name: str = ""


class AnswerReader(abc.ABC):
    """Splits the text of one answer into parts."""

    def __init__(self, markers: Sequence[str]):
        self._markers = tuple(markers)
        escaped = map(re.escape, sorted(markers, key=len, reverse=True))
        self._pattern = re.compile("|".join(escaped) or r"(?!)")
        self._pending = ""
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        """Adds text, and returns the parts that are now final."""
        self._pending += text
        for piece, is_marker in self._split():
            if is_marker:
                self._marker(piece)
            elif piece:
                self._text(piece)
        return self._taken()

    def finish(self) -> list[Part]:
        """Returns the last parts, once the answer has ended."""
        rest, self._pending = self._pending, ""
        if rest:
            self._text(rest)
        self._end()
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _split(self) -> Iterator[tuple[str, bool]]:
        """Yields texts and markers; holds back the beginning of a marker."""
        while found := self._pattern.search(self._pending):
            text, self._pending = (
                self._pending[: found.start()],
                self._pending[found.end() :],
            )
            yield text, False
            yield found[0], True
        kept = max(map(self._begun, self._markers), default=0)
        size = len(self._pending) - kept
        piece, self._pending = self._pending[:size], self._pending[size:]
        yield piece, False

    def _begun(self, marker: str) -> int:
        """Returns how many last characters may be the beginning of a marker."""
        sizes = range(min(len(marker) - 1, len(self._pending)), 0, -1)
        return next((n for n in sizes if self._pending.endswith(marker[:n])), 0)

    @abc.abstractmethod
    def _text(self, text: str) -> None:
        """Reads text without markers."""

    @abc.abstractmethod
    def _marker(self, marker: str) -> None:
        """Reads a marker."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Reads the end of the answer."""


class TaggedReader(AnswerReader):
    """Reads answers with tags around reasoning and calls.

    With `opened`, the text before the answer has opened the reasoning. Without
    `syntax`, no calls are read.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None = None,
        *,
        opened: bool = False,
        syntax: CallSyntax | None = None,
        schemas: Schemas = MappingProxyType({}),
    ):
        self._thinking: tuple[str, ...] = thinking or ()
        self._syntax, self._schemas = syntax, schemas
        tags = () if syntax is None else (syntax.opening, syntax.closing)
        super().__init__([*self._thinking, *filter(None, tags)])
        self._kind: Kind = "reasoning" if opened else "content"
        # Text read so far, by kind; trailing space of a part is dropped.
        self._read: set[Kind] = {self._kind} if opened else set()
        self._space = self._call = self._opening = ""
        self._starts = opened

    def _text(self, text: str) -> None:
        if self._kind == "call":
            self._call += text
            return
        text = self._space + text
        if self._starts:
            text = text.lstrip()
        if self._is_bare_call(text):
            self._begin("call")
            self._call = text
            return
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._starts = False
            self._read.add(self._kind)
            self._parts.append(Part(self._kind, shown))

    def _is_bare_call(self, text: str) -> bool:
        """Whether a text may be a call without an opening tag."""
        if self._syntax is None or not self._syntax.bare or "content" in self._read:
            return False
        return self._kind == "content" and text.lstrip().startswith(("{", "["))

    def _marker(self, marker: str) -> None:
        syntax, kind = self._syntax, self._kind
        opening, closing = syntax and syntax.opening, syntax and syntax.closing
        if kind == "call" and marker == closing:
            self._end_call(marker)
        elif kind != "reasoning" and marker == opening:
            if kind == "call":
                self._end_call()
            self._begin("call", marker)
        elif kind != "call" and marker in self._thinking:
            self._read.add("reasoning")
            opens = marker == self._thinking[0]
            self._begin("reasoning" if opens else "content")
            self._starts = True
        else:
            self._text(marker)

    def _begin(self, kind: Kind, opening: str = "") -> None:
        self._kind, self._opening, self._space, self._call = kind, opening, "", ""

    def _end_call(self, closing: str = "") -> None:
        """Adds the calls that were read; text that is not a call becomes content."""
        assert self._syntax is not None
        calls = self._syntax.read(self._call, self._schemas)
        text = self._opening + self._call + closing
        self._parts += [Part("call", each.arguments, each.name) for each in calls or ()]
        if not calls:
            self._parts.append(Part("content", text))
        self._read.add("call" if calls else "content")
        self._begin("content")

    def _end(self) -> None:
        if self._kind == "call":
            self._end_call()
        elif self._space and self._read <= {"content"}:
            self._parts.append(Part("content", self._space))


HARMONY = (
    *("<|start|>", "<|channel|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Tokens in gpt-oss's answers, which consist of messages with headers."""
ANALYSIS = "analysis"
"""Channel of reasoning."""


class HarmonyReader(AnswerReader):
    """Reads gpt-oss's answers. Without `calls`, they are content."""

    def __init__(self, *, calls: bool):
        super().__init__(HARMONY)
        self._calls = calls
        # The header that is read, or None within a message.
        self._header: str | None = ""
        self._kind: Kind = "content"
        self._recipient = self._body = ""

    def _text(self, text: str) -> None:
        if self._header is not None:
            self._header += text
        elif self._recipient:
            self._body += text
        else:
            self._parts.append(Part(self._kind, text))

    def _marker(self, marker: str) -> None:
        if marker == "<|message|>" and self._header is not None:
            self._begin_body(self._header)
        elif marker == "<|channel|>" and self._header is not None:
            self._header += marker
        elif marker != "<|message|>":
            self._end_call()
            self._header = ""

    def _begin_body(self, header: str) -> None:
        channel = header.partition("<|channel|>")[2].split()
        self._kind = "reasoning" if channel[:1] == [ANALYSIS] else "content"
        found = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        self._recipient = found[1] if found and self._calls else ""
        self._header, self._body = None, ""

    def _end_call(self) -> None:
        """Adds the call that was read, if the message is one."""
        if self._header is not None or not self._recipient:
            return
        calls = json_calls(f'{{"name": "f", "arguments": {self._body}}}')
        if calls:
            self._parts.append(Part("call", calls[0].arguments, self._recipient))
        else:
            self._parts.append(Part("content", self._body))

    def _end(self) -> None:
        self._end_call()
        # An answer without any header.
        if self._header and not self._parts and "<|channel|>" not in self._header:
            self._parts.append(Part("content", self._header))
