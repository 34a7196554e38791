"""Finds the learned part of a conversation by rendering its beginnings.

A conversation is rendered up to the answer that comes next; this is the context of the
answer. The text that the answer adds to it, up to the first token that ends it, is
learned: exactly the text that the model has to write. No markers are inserted, so the
data cannot contain anything mistaken for one.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from prompt_tuning.core.utf8_text import common_beginning
from prompt_tuning.data.text.message_forms import REASONING, Message, Render

PROMPT, COMPLETION = 0, 1
"""Token types; importing them would import NumPy into the process."""

TypedText = tuple[str, int]
"""A text and the type of its tokens."""

_OPENED = re.compile(r"<think>\s*\Z")
_EMPTY = re.compile(r"\A<think>\s*</think>\s*")
_CLOSED = re.compile(r"<think>\s*</think>\s*\Z")
_SHOWN = 30
"""Number of characters of a text that a message shows."""


class TemplateProblem(Exception):
    """Why a conversation cannot be rendered."""


class LearnedAnswer(NamedTuple):
    """An answer with its context.

    Attributes:
      number: number of its message, from 1.
      context: everything that the model reads before it.
      text: everything that it has to write.
      has_end: whether the text has a token that ends it.
    """

    number: int
    context: str
    text: str
    has_end: bool


def learned_answers(
    messages: Sequence[Message],
    learned: Sequence[bool],
    render: Render,
    ends: Sequence[str],
) -> list[LearnedAnswer]:
    """Returns the learned answers of a conversation.

    `learned` tells which messages are learned, and `ends` are the texts of the tokens
    that end an answer. TemplateProblem if the text that an answer adds cannot be found.
    """
    answers = []
    for number in (n for n, is_learned in enumerate(learned, 1) if is_learned):
        context = render(messages[: number - 1], True)
        text = _added(messages[:number], context, render)
        body, end = split_end(text, ends)
        if not body.strip() and says_something(messages[number - 1]):
            raise TemplateProblem(
                f"the chat template writes nothing of message {number}, which is "
                "learned: its content or its calls of tools have a form that the "
                "template does not read"
            )
        answers.append(LearnedAnswer(number, context, body + end, bool(end)))
    return answers


def join_answers(answers: Sequence[LearnedAnswer]) -> list[TypedText] | str:
    """Returns all answers with the texts between them; or why they cannot be joined.

    They can be if each is a part of the context of the next, so that a model that
    learns all of them together reads the same before each as when it answers.
    """
    texts: list[TypedText] = []
    before = ""
    for answer in answers:
        if not answer.context.startswith(before):
            return f"with message {answer.number} {_change(before, answer.context)}"
        texts.append((answer.context[len(before) :], PROMPT))
        texts.append((answer.text, COMPLETION))
        before = answer.context + answer.text
    for answer in answers[:-1]:
        if not answer.has_end:
            return (
                f"after message {answer.number} the chat template writes no token that "
                "ends an answer, so that its end would not be learned"
            )
    return texts


def _added(messages: Sequence[Message], context: str, render: Render) -> str:
    """Returns the text that the last message adds to the context of its answer."""
    text = render(messages, False)
    if text.startswith(context):
        return text[len(context) :]
    closed = _CLOSED.search(context)
    if closed is not None:
        # The context has an empty thought, after which no other one is written.
        bare = render([*messages[:-1], without_thoughts(messages[-1])], False)
        if bare.startswith(context[: closed.start()]):
            return _EMPTY.sub("", bare[closed.start() :])
    opened = _OPENED.search(context)
    if opened is not None and text.startswith(context[: opened.start()]):
        # The context begins a thought, which the template drops from answers.
        rest = text[opened.start() :]
        if rest.startswith("<think>"):
            return rest.removeprefix("<think>")
        gap = "" if rest.startswith("\n") else "\n\n"
        return f"{thoughts_of(messages[-1])}\n</think>{gap}{rest}"
    raise TemplateProblem(
        f"with message {len(messages)} {_change(context, text)}, so the learned text "
        "cannot be identified; use another chat_template"
    )


def _change(before: str, after: str) -> str:
    """Describes where a rendering differs from an earlier one."""
    at = len(common_beginning(before, after))
    # Shows a token that begins before the difference.
    start = before.rfind("<", max(at - _SHOWN, 0), at)
    at = start if start >= 0 and ">" not in before[start:at] else at
    return (
        f"the chat template writes {after[at : at + _SHOWN]!r} where it wrote "
        f"{before[at : at + _SHOWN]!r} without it"
    )


def split_end(text: str, ends: Sequence[str]) -> tuple[str, str]:
    """Divides an answer before the first of the end tokens at its end.

    The text after that token, such as a line feed, is never written by a model.
    """
    body, end, rest = text, "", text.rstrip()
    while found := next((x for x in ends if x and rest.endswith(x)), ""):
        body, end = rest[: -len(found)], found
        rest = body.rstrip()
    return body, end


def says_something(message: Message) -> bool:
    """Tests whether an answer has a text or calls a tool."""
    content: Any = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return bool((content or "").strip() or message.get("tool_calls"))


def thoughts_of(message: Message) -> str:
    """Returns the thoughts of an answer, without the line feeds around them."""
    for name in REASONING:
        if isinstance(message.get(name), str):
            return message[name].strip("\n")
    content = message.get("content")
    before = content.rpartition("</think>")[0] if isinstance(content, str) else ""
    return before.rpartition("<think>")[2].strip("\n")


def without_thoughts(message: Message) -> Message:
    """Returns an answer without its thoughts."""
    rest = {name: x for name, x in message.items() if name not in REASONING}
    content = rest.get("content")
    if isinstance(content, str):
        rest["content"] = content.rpartition("</think>")[2].lstrip("\n")
    return rest
