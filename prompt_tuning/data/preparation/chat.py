"""Chat templates: turns rendered as a model expects them, with types kept right.

What is learned is found by rendering a conversation turn by turn: the text that an
answer adds to the prompt before it is the answer's. Nothing is put into the text to be
found again, so no text can be mistaken for a mark.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.errors import InputError
from prompt_tuning.losses.weights import COMPLETION, PROMPT

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

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
    """

    source: str
    special: Mapping[str, str]
    origin: str

    def runs(self, messages: Sequence[Message], place: str) -> list[Run]:
        """The conversation as texts, each given (type 0) or an answer (type 1).

        Raises:
          InputError: if there is no answer in it, or the template refuses it or writes
            a turn otherwise once another follows, so that no text is the answer's.
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
        import jinja2

        try:
            return self._compiled.render(
                messages=list(messages),
                add_generation_prompt=answer_next,
                **self.special,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError(
                f"{place}: the chat template of {self.origin} does not take these "
                f"messages: {error}"
            ) from error

    @functools.cached_property
    def _compiled(self) -> "jinja2.Template":
        import jinja2

        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise InputError(
                f"the chat template of {self.origin} is not jinja2: {error}"
            ) from error

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


def _environment() -> "jinja2.Environment":
    """The dialect of Hugging Face's templates: blocks trimmed, loop controls, JSON."""
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
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


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


def read_chat_template(folder: Path, file: str | None) -> ChatTemplate:
    """The template of a tokenizer's folder, or of another file.

    Raises:
      InputError: if there is none, or it is not jinja2.
    """
    config = _config(folder)
    special = {
        name: content
        for name, entry in config.items()
        if name.endswith("_token") and isinstance(content := _content(entry), str)
    }
    if file is not None:
        template = ChatTemplate(_text(Path(file)), special, file)
    elif (folder / TEMPLATE_FILE).is_file():
        own = folder / TEMPLATE_FILE
        template = ChatTemplate(_text(own), special, str(own))
    else:
        origin = str(folder / CONFIG_FILE)
        template = ChatTemplate(_named(config, origin), special, origin)
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


def _config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        found = json.loads(_text(file))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _content(entry: Any) -> Any:
    return entry.get("content") if isinstance(entry, dict) else entry


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
