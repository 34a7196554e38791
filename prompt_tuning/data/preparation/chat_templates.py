"""Reads chat templates and renders conversations with them."""

import dataclasses
import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.data.preparation.template_process import TemplateProcess
from prompt_tuning.data.preparation.template_renderer import Message, TypedText
from prompt_tuning.data.text.special_tokens import CONFIG_FILE, read_json_object

TEMPLATE_FILE = "chat_template.jinja"
MAXIMUM_TEMPLATE = 2**20
"""Maximum size of a template's file in bytes."""


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
          InputError: if the template rejects the messages, exceeds its limits, or
            renders a message differently once another follows, so that the answer's
            text is not defined.
        """
        (texts,) = self.render_many([messages])
        if isinstance(texts, str):
            raise InputError(f"{location}: {texts}")
        return texts

    def render_many(
        self, conversations: Sequence[Sequence[Message]]
    ) -> Iterator[list[TypedText] | str]:
        """Yields what `render` returns for each conversation, or its problem."""
        return self._process.render(conversations)

    @functools.cached_property
    def _process(self) -> TemplateProcess:
        date = None if self.date is None else self.date.isoformat()
        return TemplateProcess(self.source, self.special_tokens, self.origin, date)

    @functools.cached_property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""
        return self._process.uses_date

    @property
    def eos_token(self) -> str | None:
        """Text of EOS, if the tokenizer's folder names it."""
        return self.special_tokens.get("eos_token")

    def check(self) -> None:
        """Compiles the template.

        Raises:
          InputError: if the template is not jinja2.
        """
        assert self._process is not None


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
        return read_limited(file, MAXIMUM_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} cannot be read: {error}") from error
