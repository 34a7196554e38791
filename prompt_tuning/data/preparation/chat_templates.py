"""Renders conversations with chat templates and finds the text that is learned.

A conversation is rendered message by message: an answer's text is what rendering the
answer adds to the prompt before it. No markers are inserted into the text, so the data
cannot contain anything that is mistaken for one.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT
from prompt_tuning.data.text.special_tokens import CONFIG_FILE, read_json_object

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"

DATE_FUNCTION = "strftime_now"
"""Name of the function that gives a template the current date."""

Message = Mapping[str, Any]
TypedText = tuple[str, int]
"""A text and the type of its tokens."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 chat template, as stored in `tokenizer_config.json`.

    Attributes:
      source: text of the template.
      special_tokens: texts of `bos_token`, `eos_token` and other special tokens.
      origin: file of the template, for messages.
      date: date given to the template as the current one; None for the real one.
    """

    source: str
    special_tokens: Mapping[str, str]
    origin: str
    date: datetime.date | None = None

    def render(self, messages: Sequence[Message], location: str) -> list[TypedText]:
        """Renders a conversation as prompts (type 0) and answers (type 1).

        Raises:
          InputError: if the template rejects the messages, or renders a message
            differently once another follows, so that the answer's text is not defined.
        """
        texts: list[TypedText] = []
        rendered = ""
        for number, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[: number - 1], True, location)
            after = self._render(messages[:number], False, location)
            _check_extends(rendered, before, number, location)
            _check_extends(before, after, number, location)
            texts.append((before[len(rendered) :], PROMPT))
            texts.append((after[len(before) :], COMPLETION))
            rendered = after
        if messages[-1]["role"] != "assistant":
            after = self._render(messages, False, location)
            _check_extends(rendered, after, len(messages), location)
            texts.append((after[len(rendered) :], PROMPT))
        return texts

    def _render(
        self, messages: Sequence[Message], answer_next: bool, location: str
    ) -> str:
        try:
            return self._compiled.render(
                messages=[_drop_none(message) for message in messages],
                # Templates test these for None without testing that they are defined.
                tools=None,
                documents=None,
                add_generation_prompt=answer_next,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program that can raise anything
            reason = str(error) or type(error).__name__
            raise InputError(
                f"{location}: the chat template of {self.origin} does not accept these "
                f"messages: {reason}"
            ) from error

    @functools.cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment(self._format_date).from_string(self.source)
        except jinja2.TemplateError as error:
            raise InputError(
                f"the chat template of {self.origin} is not jinja2: {error}"
            ) from error

    def _format_date(self, form: str) -> str:
        day = self.date or datetime.date.today()
        return datetime.datetime.combine(day, datetime.time()).strftime(form)

    @functools.cached_property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""
        from jinja2 import nodes

        parsed = self._compiled.environment.parse(self.source)
        return any(name.name == DATE_FUNCTION for name in parsed.find_all(nodes.Name))

    @property
    def eos_token(self) -> str | None:
        """Text of EOS, if the tokenizer's folder names it."""
        return self.special_tokens.get("eos_token")

    def check(self) -> None:
        """Compiles the template.

        Raises:
          InputError: if the template is not jinja2.
        """
        assert self._compiled is not None


def _check_extends(before: str, after: str, number: int, location: str) -> None:
    if after.startswith(before):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    raise InputError(
        f"{location}: with message {number} the chat template writes "
        f"{after[at : at + 30]!r} where it wrote {before[at : at + 30]!r} without it, "
        "so the learned text cannot be identified; put each turn on a separate line, "
        "or use another --chat_template"
    )


def _drop_none(message: Message) -> dict[str, Any]:
    """Drops the keys that hold None, which templates would write as text."""
    return {name: value for name, value in message.items() if value is not None}


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


@functools.cache
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


def read_chat_template(
    folder: Path,
    file: str | None,
    special_tokens: Mapping[str, str],
    date: datetime.date | None = None,
) -> ChatTemplate:
    """Reads the chat template of a tokenizer's folder, or another file.

    Args:
      folder: folder of the tokenizer.
      file: path of another template; None for the folder's own.
      special_tokens: see `ChatTemplate`.
      date: see `ChatTemplate`.

    Raises:
      InputError: if the template is missing or not jinja2.
    """
    folder_file = folder / TEMPLATE_FILE
    if file is None and folder_file.is_file():
        file = str(folder_file)
    if file is not None:
        source, origin = _read_text(Path(file)), file
    else:
        origin = str(folder / CONFIG_FILE)
        source = _default_template(read_json_object(folder / CONFIG_FILE), origin)
    template = ChatTemplate(source, special_tokens, origin, date)
    template.check()
    return template


def _default_template(config: dict[str, Any], origin: str) -> str:
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        by_name = {entry.get("name"): entry.get("template") for entry in entries}
        template = by_name.get("default")
    if not isinstance(template, str):
        raise InputError(
            f"{origin} has no chat_template, which --chat needs; pass a file that has "
            "one as --chat_template"
        )
    return template


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
