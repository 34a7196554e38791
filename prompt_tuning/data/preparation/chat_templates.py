"""Chat templates: turns rendered as a model expects them, with types kept right.

What is learned is found by rendering a conversation turn by turn: the text that an
answer adds to the prompt before it is the answer's. Nothing is put into the text to be
found again, so no text can be mistaken for a mark.
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

DATE = "strftime_now"
"""The function by which a template asks for the date."""

Message = Mapping[str, Any]
Run = tuple[str, int]
"""A text and the type of its tokens."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template in jinja2, as `tokenizer_config.json` holds it.

    Attributes:
      source: the template.
      special: the texts of `bos_token`, `eos_token` and their like.
      origin: where it came from, for messages.
      date: what it is told where it asks for today's; None for that of the clock.
    """

    source: str
    special: Mapping[str, str]
    origin: str
    date: datetime.date | None = None

    def runs(self, messages: Sequence[Message], place: str) -> list[Run]:
        """The conversation as texts, each given (type 0) or an answer (type 1).

        Raises:
          InputError: if the template refuses it, or writes a turn otherwise once
            another follows, so that no text is the answer's.
        """
        runs: list[Run] = []
        rendered = ""
        for number, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[: number - 1], True, place)
            after = self._render(messages[:number], False, place)
            _check_continues(rendered, before, number, place)
            _check_continues(before, after, number, place)
            runs.append((before[len(rendered) :], PROMPT))
            runs.append((after[len(before) :], COMPLETION))
            rendered = after
        if messages[-1]["role"] != "assistant":
            after = self._render(messages, False, place)
            _check_continues(rendered, after, len(messages), place)
            runs.append((after[len(rendered) :], PROMPT))
        return runs

    def _render(
        self, messages: Sequence[Message], answer_next: bool, place: str
    ) -> str:
        try:
            return self._compiled.render(
                messages=[_without_nothing(message) for message in messages],
                # Templates ask whether there are any, not only whether it is said.
                tools=None,
                documents=None,
                add_generation_prompt=answer_next,
                **self.special,
            )
        except Exception as error:  # a template is a program, which raises anything
            said = str(error) or type(error).__name__
            raise InputError(
                f"{place}: the chat template of {self.origin} does not take these "
                f"messages: {said}"
            ) from error

    @functools.cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment(self._formatted_date).from_string(self.source)
        except jinja2.TemplateError as error:
            raise InputError(
                f"the chat template of {self.origin} is not jinja2: {error}"
            ) from error

    def _formatted_date(self, form: str) -> str:
        day = self.date or datetime.date.today()
        return datetime.datetime.combine(day, datetime.time()).strftime(form)

    @functools.cached_property
    def asks_the_date(self) -> bool:
        """Whether what it writes depends on the date."""
        from jinja2 import nodes

        parsed = self._compiled.environment.parse(self.source)
        return any(name.name == DATE for name in parsed.find_all(nodes.Name))

    @property
    def eos_token(self) -> str | None:
        """The text of EOS, where the folder names it."""
        return self.special.get("eos_token")

    def check(self) -> None:
        """Compiles the template.

        Raises:
          InputError: if it is not jinja2.
        """
        assert self._compiled is not None


def _check_continues(before: str, after: str, number: int, place: str) -> None:
    if after.startswith(before):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    raise InputError(
        f"{place}: with message {number} the chat template writes "
        f"{after[at : at + 30]!r} where it wrote {before[at : at + 30]!r} without it, "
        "so what is learned cannot be told apart; give each turn a line of its own, or "
        "another --chat_template"
    )


def _without_nothing(message: Message) -> dict[str, Any]:
    """A message without keys that hold None, which templates would write as text."""
    return {name: value for name, value in message.items() if value is not None}


def _environment(formatted_date: Callable[[str], str]) -> "jinja2.Environment":
    """The dialect of Hugging Face's templates: blocks trimmed, loop controls, JSON.

    So `transformers.PreTrainedTokenizerBase.apply_chat_template` renders them.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals[DATE] = formatted_date
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _generation_extension() -> type:
    """Lets `{% generation %}` blocks stand; they mark what the types say already."""
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
    special: Mapping[str, str],
    date: datetime.date | None = None,
) -> ChatTemplate:
    """The template of a tokenizer's folder, or of another file.

    Args:
      folder: the tokenizer's.
      file: another template's; None for the folder's own.
      special: see `ChatTemplate`; so the next.
      date: what a template is told.

    Raises:
      InputError: if there is none, or it is not jinja2.
    """
    own = folder / TEMPLATE_FILE
    if file is None and own.is_file():
        file = str(own)
    if file is not None:
        template = ChatTemplate(_text(Path(file)), special, file, date)
    else:
        origin = folder / CONFIG_FILE
        source = _named(read_json_object(origin), str(origin))
        template = ChatTemplate(source, special, str(origin), date)
    template.check()
    return template


def _named(config: dict[str, Any], origin: str) -> str:
    found = config.get("chat_template")
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        found = named.get("default")
    if not isinstance(found, str):
        raise InputError(
            f"{origin} has no chat_template, which --chat asks for; name a file with "
            "one with --chat_template"
        )
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
