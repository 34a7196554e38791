"""Renders conversations with a chat template, in a process that may be killed.

A template is a program from a foreign file; see `template_server` for the process.
"""

import datetime
import functools
import marshal
import signal
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from prompt_tuning.core.errors import MAXIMUM_SHOWN, did_you_mean, shown
from prompt_tuning.data.text.learned_answers import (
    COMPLETION,
    PROMPT,
    TemplateProblem,
    TypedText,
    join_answers,
    learned_answers,
    split_end,
)
from prompt_tuning.data.text.message_forms import Message, MessageForms
from prompt_tuning.data.text.template_environment import (
    DATE_FUNCTION,
    template_environment,
    variables_read,
)

MAXIMUM_SECONDS = 1.5
"""Maximum computing time of one rendering, and of compiling a template."""

MAXIMUM_MEMORY = 2**30
"""Maximum size in bytes of the address space of the process that renders."""

FREE_TEXT = 2**20
"""Number of characters that every conversation may be rendered to."""

MAXIMUM_GROWTH = 16
"""Maximum number of characters that a conversation above `FREE_TEXT` is rendered to,
for each byte of its messages.
"""

MAXIMUM_MESSAGES = 1000
"""Maximum number of messages of a conversation. It is rendered twice for each answer,
so that its time grows with the square of their number.
"""

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Text at the end of a last message that is continued, as in transformers. The space
shows whether the template trims it.
"""


class ChatRecord(NamedTuple):
    """A conversation, and everything else that its rendering depends on.

    Attributes:
      messages: objects with a role and a content: a text, None, or a list of text
        parts.
      learned: whether a message is an answer to learn.
      tools: the tools that the model may call, as the template reads them, or None.
      variables: more variables of the template, by name, or None. Like transformers,
        the template ignores variables that it does not read.
      chosen: names of variables that a setting gives, which the template must read.
    """

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] | None = None
    chosen: tuple[str, ...] = ()


class LearnedTexts(NamedTuple):
    """A conversation as texts to learn.

    Attributes:
      examples: texts by example: contexts (type 0) and answers (type 1).
      change: why not all answers are in one example; None if they are.
    """

    examples: list[list[TypedText]]
    change: str | None = None


class TemplateRenderer:
    """A compiled template; arguments are as in `ChatTemplate`, with an ISO date."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        date: str | None,
        tool_source: str | None,
    ):
        self._origin = origin
        self._special_tokens = special_tokens
        self._date = None if date is None else datetime.date.fromisoformat(date)
        self._environment = template_environment(self._format_date)
        # With and without tools.
        self._sources = {True: tool_source or source, False: source}
        self._templates = {
            with_tools: self._environment.from_string(text)
            for with_tools, text in self._sources.items()
        }
        self._forms: dict[bool, MessageForms] = {}

    @functools.cached_property
    def _variables(self) -> tuple[set[str], set[str]]:
        """Names that the template reads, and the ones to be set from outside."""
        return variables_read(self._environment, self._sources.values())

    @property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""
        return DATE_FUNCTION in self._variables[0]

    def text(self, record: ChatRecord) -> str:
        """Renders a conversation as it is."""
        return self._rendering(record)(record.messages, False)

    def prompt(self, record: ChatRecord) -> str:
        """Renders a conversation up to the answer that comes next.

        If the last message is from the assistant, it is continued.
        """
        *others, last = record.messages
        if last["role"] != "assistant":
            return self._rendering(record)(record.messages, True)
        text, message = _tagged(last)
        rendered = self._rendering(record)([*others, message], False)
        tag = CONTINUED.rstrip()
        if text.strip() not in rendered or tag not in rendered:
            raise TemplateProblem(
                f"the chat template of {self._origin} does not write the last message "
                "as it is, so that it cannot be continued: end with a message of the "
                "user"
            )
        before, _, after = rendered.rpartition(tag)
        kept = after.startswith(CONTINUED.removeprefix(tag))
        return before if kept else before.rstrip()

    def learned(
        self, record: ChatRecord, ends: Sequence[str], apart: bool
    ) -> LearnedTexts:
        """Renders a conversation as texts to learn.

        `ends` are texts of the tokens that end an answer. With `apart`, every answer
        has an example even if they can be joined.
        """
        render, messages = self._rendering(record), record.messages
        answers = learned_answers(messages, record.learned, render, ends)
        change = "each answer has an example" if apart else None
        joined = [] if apart else join_answers(answers)
        if isinstance(joined, str):
            change, joined = joined, []
        rest = "" if record.learned[-1] else render(messages, False)
        rest = "".join(split_end(rest, ends))
        before = "".join(text for text, _ in joined)
        if change is None and (not rest or rest.startswith(before)):
            after = [(rest[len(before) :], PROMPT)] if rest else []
            return LearnedTexts([[*joined, *after]], None)
        examples = [[(x.context, PROMPT), (x.text, COMPLETION)] for x in answers]
        return LearnedTexts(examples + ([[(rest, PROMPT)]] if rest else []), change)

    def _rendering(self, record: ChatRecord) -> "_Rendering":
        """Returns a function that renders messages of a conversation."""
        count = len(record.messages)
        if count > MAXIMUM_MESSAGES:
            raise TemplateProblem(
                f"{count:,} messages, expected at most {MAXIMUM_MESSAGES:,}: "
                "divide the conversation into several"
            )
        for name in record.chosen:
            self._check_variable(name)
        with_tools = record.tools is not None
        if with_tools not in self._forms:
            bare = functools.partial(self._render, record._replace(variables=None))
            self._forms[with_tools] = MessageForms(self._sources[with_tools], bare)
        return _Rendering(self, record)

    def _check_variable(self, name: str) -> None:
        read, meant = self._variables
        if name not in read:
            names = ", ".join(sorted(meant - self._special_tokens.keys())) or "none"
            raise TemplateProblem(
                f"the chat template of {self._origin} does not read the variable "
                f"{shown(name)}{did_you_mean(name, meant)}; it reads: {names}"
            )

    def _render(
        self, record: ChatRecord, messages: Sequence[Message], answer_next: bool
    ) -> str:
        limit_time()
        # Templates test tools and documents for None without testing that they exist.
        variables = {"documents": None, **self._special_tokens}
        variables |= record.variables or {}
        return self._templates[record.tools is not None].render(
            variables,
            messages=messages,
            tools=record.tools,
            add_generation_prompt=answer_next,
        )

    def rejection(self, reason: str) -> str:
        """Returns the message for a conversation that the template rejects."""
        template = f"the chat template of {self._origin}"
        return f"{template} does not accept these messages: {reason}"

    def _format_date(self, form: str) -> str:
        day = self._date or datetime.date.today()
        return datetime.datetime.combine(day, datetime.time()).strftime(form)


class _Rendering:
    """Renders messages of one conversation, and explains what is wrong with them."""

    def __init__(self, renderer: TemplateRenderer, record: ChatRecord):
        self._renderer, self._record = renderer, record
        self._convert = renderer._forms[record.tools is not None]
        self._limit = max(FREE_TEXT, MAXIMUM_GROWTH * _size(tuple(record)))

    def __call__(self, messages: Sequence[Message], answer_next: bool) -> str:
        try:
            text = self._render(messages, answer_next)
        except Exception as error:  # a template is a program that can raise anything
            raise TemplateProblem(self._explain(messages, error)) from error
        if len(text) > self._limit:
            raise TemplateProblem(
                f"the chat template of {self._renderer._origin} renders these messages "
                f"as {len(text):,} characters, expected at most {self._limit:,}"
            )
        return text

    def _render(self, messages: Sequence[Message], answer_next: bool) -> str:
        return self._renderer._render(
            self._record, self._convert(messages), answer_next
        )

    def _explain(self, messages: Sequence[Message], error: Exception) -> str:
        """Returns the message about an error, with its line and the first message."""
        why, line = reason(error), _line_of(error)
        at = "" if line is None else f" (line {line} of the template)"
        first, last = 1, len(messages)
        while first < last:
            middle = (first + last) // 2
            if self._fails_alike(messages[:middle], why):
                last = middle
            else:
                first = middle + 1
        return self._renderer.rejection(f"message {last}: {why}{at}")

    def _fails_alike(self, messages: Sequence[Message], why: str) -> bool:
        try:
            self._render(messages, False)
        except Exception as error:  # a template is a program that can raise anything
            return reason(error) == why
        return False


def _line_of(error: Exception) -> int | None:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return lines[-1] if lines else None


def _tagged(message: Message) -> tuple[str, Message]:
    """Returns the text at the end of a message, and the message with a tag after it."""
    content = message.get("content")
    if isinstance(content, str):
        return content, {**message, "content": content + CONTINUED}
    if not content:
        raise TemplateProblem("the last message has no text that can be continued")
    *parts, last = content
    part = {**last, "text": last["text"] + CONTINUED}
    return last["text"], {**message, "content": [*parts, part]}


def reason(error: BaseException) -> str:
    """Returns an error's message, shortened."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MAXIMUM_MEMORY:,} bytes of memory"
    return str(error)[:MAXIMUM_SHOWN] or type(error).__name__


def limit_time() -> None:
    """Lets the process be ended when it computes for longer than allowed from now."""
    signal.setitimer(signal.ITIMER_PROF, MAXIMUM_SECONDS)


def _size(value: Any) -> int:
    return len(marshal.dumps(value))
