"""Renders conversations with a chat template, in a process that may be killed.

A conversation is rendered message by message: the text of an answer is what it adds to
the rendered prompt before it. No markers are inserted, so no data can be mistaken for
one.

A template is a program from a foreign file. Only `serve` compiles and runs it. Its
process has little memory, ends itself if a rendering takes too long, and exchanges
plain values with its parent: each frame is a length and a marshaled value.
"""

import contextlib
import datetime
import json
import marshal
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from prompt_tuning.core.errors import MAXIMUM_SHOWN

if TYPE_CHECKING:
    import jinja2

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

DATE_FUNCTION = "strftime_now"
"""Name of the function that gives a template the current date."""

PROMPT, COMPLETION = 0, 1
"""Token types; importing them would import NumPy into the process."""

PROBE, PROBE_KEY = "the text of a part", "its other key"
"""A text, and a key that a template writes only if it does not read parts."""

_LENGTH = struct.Struct("<Q")

Message = Mapping[str, Any]
TypedText = tuple[str, int]
"""A text and the type of its tokens."""


class ChatRecord(NamedTuple):
    """A conversation, and everything else that its rendering depends on.

    Attributes:
      messages: objects with a role and a content: a text, None, or a list of text
        parts.
      learned: whether each message is an answer that is learned.
      tools: the tools that the model may call, as the template reads them; None for
        none.
      variables: further variables of the template, by name; None for none.
    """

    messages: tuple[Message, ...]
    learned: tuple[bool, ...]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] | None = None


class TemplateProblem(Exception):
    """Why a conversation cannot be rendered."""


class TemplateRenderer:
    """A compiled template.

    Args:
      source: text of the template.
      special_tokens: texts of `bos_token`, `eos_token` and other special tokens.
      origin: file of the template, for messages.
      date: ISO date given to the template as the current one; None for the real one.
      tool_source: text of the template for conversations with tools; None if it is the
        same.
    """

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
        self._environment = _environment(self._format_date)
        self._template = self._environment.from_string(source)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = self._environment.from_string(tool_source)
        self._sources = source, tool_source or ""
        self._reads_parts: dict[bool, bool] = {}

    @property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""
        from jinja2 import nodes

        parsed = [self._environment.parse(source) for source in self._sources]
        names = [name.name for each in parsed for name in each.find_all(nodes.Name)]
        return DATE_FUNCTION in names

    def render(self, record: ChatRecord) -> list[TypedText]:
        """Renders a conversation as prompts (type 0) and learned answers (type 1).

        Raises:
          TemplateProblem: if the template rejects the messages, renders more text than
            allowed, or renders a message differently once another follows, so that the
            answer's text is not defined.
        """
        count = len(record.messages)
        if count > MAXIMUM_MESSAGES:
            raise TemplateProblem(
                f"{count:,} messages, expected at most {MAXIMUM_MESSAGES:,}: "
                "divide the conversation into several"
            )
        record = self._read_parts(record)
        limit = max(FREE_TEXT, MAXIMUM_GROWTH * _size(tuple(record)))
        texts: list[TypedText] = []
        rendered = ""
        for number, learned in enumerate(record.learned, start=1):
            if not learned:
                continue
            before = self._render(record, number - 1, True, limit)
            after = self._render(record, number, False, limit)
            _check_extends(rendered, before, number)
            _check_extends(before, after, number)
            texts.append((before[len(rendered) :], PROMPT))
            texts.append((after[len(before) :], COMPLETION))
            rendered = after
        if not record.learned[-1]:
            after = self._render(record, count, False, limit)
            _check_extends(rendered, after, count)
            texts.append((after[len(rendered) :], PROMPT))
        return texts

    def _render(
        self, record: ChatRecord, count: int, answer_next: bool, limit: int
    ) -> str:
        """Renders the first messages of a conversation."""
        try:
            text = self._render_messages(record, count, answer_next)
        except Exception as error:  # a template is a program that can raise anything
            raise TemplateProblem(self.rejection(reason(error))) from error
        if len(text) > limit:
            raise TemplateProblem(
                f"the chat template of {self._origin} renders these messages as "
                f"{len(text):,} characters, expected at most {limit:,}"
            )
        return text

    def _render_messages(
        self, record: ChatRecord, count: int, answer_next: bool
    ) -> str:
        limit_time()
        with_tools = record.tools is not None
        template = self._tool_template if with_tools else self._template
        # Templates test tools and documents for None without testing that they exist.
        variables = {"documents": None, **self._special_tokens}
        variables |= record.variables or {}
        return template.render(
            variables,
            messages=[_drop_none(message) for message in record.messages[:count]],
            tools=record.tools,
            add_generation_prompt=answer_next,
        )

    def _read_parts(self, record: ChatRecord) -> ChatRecord:
        """Joins the parts of contents, unless the template itself reads parts."""
        messages = record.messages
        if not any(isinstance(message.get("content"), list) for message in messages):
            return record
        has_tools = record.tools is not None
        if has_tools not in self._reads_parts:
            self._reads_parts[has_tools] = self._finds_text_in_parts(record)
        if self._reads_parts[has_tools]:
            return record
        return record._replace(messages=tuple(map(join_parts, messages)))

    def _finds_text_in_parts(self, record: ChatRecord) -> bool:
        """Returns whether the template writes the text of a part, and only the text."""
        part = {"type": "text", "text": PROBE, PROBE_KEY: PROBE_KEY}
        message = {"role": "user", "content": [part]}
        probe = record._replace(messages=(message,), learned=(False,))
        try:
            text = self._render_messages(probe, 1, True)
        except Exception:  # a template is a program that can raise anything
            return False
        return PROBE in text and PROBE_KEY not in text

    def rejection(self, reason: str) -> str:
        """Returns the message for a conversation that the template rejects."""
        template = f"the chat template of {self._origin}"
        return f"{template} does not accept these messages: {reason}"

    def _format_date(self, form: str) -> str:
        day = self._date or datetime.date.today()
        return datetime.datetime.combine(day, datetime.time()).strftime(form)


def reason(error: BaseException) -> str:
    """Returns an error's message, shortened."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MAXIMUM_MEMORY:,} bytes of memory"
    return str(error)[:MAXIMUM_SHOWN] or type(error).__name__


def limit_time() -> None:
    """Lets the process be ended when it computes for longer than allowed from now."""
    signal.setitimer(signal.ITIMER_PROF, MAXIMUM_SECONDS)


def _check_extends(before: str, after: str, number: int) -> None:
    if after.startswith(before):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    raise TemplateProblem(
        f"with message {number} the chat template writes {after[at : at + 30]!r} where "
        f"it wrote {before[at : at + 30]!r} without it, so the learned text cannot be "
        "identified; put each turn on a separate line, or use another chat_template"
    )


def _drop_none(message: Message) -> dict[str, Any]:
    """Drops the keys that hold None, which templates would write as text.

    A content of None remains: templates test it, and write nothing for it.
    """
    return {
        name: value
        for name, value in message.items()
        if value is not None or name == "content"
    }


def join_parts(message: Message) -> Message:
    """Returns a message with a text instead of parts as content."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _environment(format_date: Callable[[str], str]) -> "jinja2.Environment":
    """Creates the jinja2 environment of Hugging Face's chat templates.

    It matches `transformers.PreTrainedTokenizerBase.apply_chat_template`: trimmed
    blocks, loop controls, plain JSON and a sandbox.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals[DATE_FUNCTION] = format_date
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _generation_extension() -> type:
    """Returns an extension that ignores the markers of `{% generation %}` blocks.

    The markers identify answers, which are found without them here.
    """
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _size(value: Any) -> int:
    """Returns the number of bytes of a value of plain types."""
    return len(marshal.dumps(value))


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Writes a value of plain types."""
    content = marshal.dumps(value)
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)


def read_frame(stream: IO[bytes]) -> Any:
    """Reads a value.

    Raises:
      EOFError: if the other process has ended.
    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("the other process has ended")
    (size,) = _LENGTH.unpack(header)
    content = stream.read(size)
    if len(content) < size:
        raise EOFError("the other process has ended")
    return marshal.loads(content)


def serve() -> None:
    """Compiles a template, then renders lists of conversations until the input ends.

    The first frame has the arguments of `TemplateRenderer`; the answer is whether the
    template uses the date, or what is wrong with it. Then each frame is a list of
    conversations, of which each is answered by its typed texts, or its problem.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # macOS has no such limit, and a lower one may be set already.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAXIMUM_MEMORY, MAXIMUM_MEMORY))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    arguments = read_frame(requests)
    import jinja2.sandbox  # noqa: F401  # is no part of compiling

    limit_time()
    try:
        renderer = TemplateRenderer(*arguments)
        answer = renderer.uses_date
    # Python's compiler raises SyntaxError, RecursionError and others for templates that
    # jinja2 accepts.
    except Exception as error:
        write_frame(answers, reason(error))
        answers.flush()
        return
    write_frame(answers, answer)
    answers.flush()
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for fields in read_frame(requests):
            try:
                write_frame(answers, renderer.render(ChatRecord(*fields)))
            except TemplateProblem as problem:
                write_frame(answers, str(problem))
            except MemoryError as error:
                write_frame(answers, renderer.rejection(reason(error)))
            answers.flush()
