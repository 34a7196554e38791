"""Reads chat templates and renders conversations with them."""

import dataclasses
import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.core.setting_hints import FILE, how_to_set
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.data.text.gguf_tokenizer import read_gguf_templates
from prompt_tuning.data.text.special_tokens import (
    CONFIG_FILE,
    read_json_object,
    read_settings,
    role_texts,
)
from prompt_tuning.data.text.template_process import TemplateProcess
from prompt_tuning.data.text.template_renderer import ChatRecord, LearnedTexts
from prompt_tuning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    hidden_tokens,
)

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILE = "chat_template.json"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
TOKENIZER, CHAT_TEMPLATE = "Pretrained.tokenizer", "DataSource.chat_template"
"""Settings that messages name."""
MAXIMUM_TEMPLATE = 2**20
"""Maximum size of a template's file in bytes."""
ANSWER, CALLS = "answer", ("first_call", "second_call")
"""Content of an answer, and names of tools that another one calls."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 chat template, as stored in `tokenizer_config.json`.

    Attributes:
      source: text of the template.
      special_tokens: texts of `bos_token`, `eos_token` and other special tokens.
      origin: file of the template, for messages.
      date: date given to the template as the current one; None for the real one.
      tool_source: text of the template for conversations with tools; None if it is the
        same.
      variables: variables of all conversations, unless they set them themselves.
    """

    source: str
    special_tokens: Mapping[str, str]
    origin: str
    date: datetime.date | None = None
    tool_source: str | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def prompt(self, record: ChatRecord, location: str) -> str:
        """Renders a conversation up to its next answer, or what continues its last."""
        (text,) = self.render_many("prompt", [record])
        if isinstance(text, str):
            raise InputError(f"{location}: {text}")
        return text[0]

    def learned_many(
        self,
        conversations: Sequence[ChatRecord],
        ends: Sequence[str] = (),
        *,
        apart: bool = False,
    ) -> Iterator[LearnedTexts | str]:
        """Yields each conversation as texts to learn, or what is wrong with it.

        For the arguments see `TemplateRenderer.learned`.
        """
        for each in self.render_many("learned", conversations, list(ends), apart):
            yield each if isinstance(each, str) else LearnedTexts(*each[0])

    def render_many(
        self, method: str, conversations: Sequence[ChatRecord], *arguments: Any
    ) -> Iterator[tuple[Any] | str]:
        """Yields what a method of `TemplateRenderer` returns, or a problem."""
        if self.variables:
            conversations = [
                x._replace(
                    variables={**self.variables, **(x.variables or {})},
                    chosen=(*self.variables, *x.chosen),
                )
                for x in conversations
            ]
        return self._process.render(method, conversations, *arguments)

    @functools.cached_property
    def _process(self) -> TemplateProcess:
        date = None if self.date is None else self.date.isoformat()
        return TemplateProcess(
            self.source, self.special_tokens, self.origin, date, self.tool_source
        )

    @functools.cached_property
    def uses_date(self) -> bool:
        """Whether the rendered text depends on the current date."""
        return self._process.uses_date

    @property
    def eos_token(self) -> str | None:
        """Text of EOS, if the tokenizer's folder names it."""
        return self.special_tokens.get("eos_token")

    def check(self) -> None:
        """Compiles the template; InputError if it is not jinja2."""
        assert self._process is not None


def chat_template_of(
    tokenizer: Tokenizer,
    file: str | None = None,
    date: datetime.date | None = None,
    folder: Path | None = None,
) -> ChatTemplate:
    """Reads the chat template in the folder that a tokenizer was loaded from.

    Another `folder` has the template and the names of special tokens; `file` is another
    template. For the date see `ChatTemplate`.
    """
    own: Path = getattr(tokenizer, "folder", None) or Path()
    folder = own if folder is None else folder
    return read_chat_template(folder, file, role_texts_of(tokenizer, folder), date)


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Tests whether a tokenizer's folder contains a chat template."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.folder is None:
        return False
    return has_own_template(tokenizer.folder)


def has_own_template(folder: Path) -> bool:
    """Tests whether a folder contains a chat template."""
    if (folder / TEMPLATE_FILE).is_file():
        return True
    return "default" in _named_templates(folder)


def role_texts_of(tokenizer: Tokenizer, folder: Path) -> dict[str, str]:
    """Returns the texts of the special tokens by the names that chat templates use.

    A tokenizer may define BOS and EOS although no file in its `folder` names them.
    """
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    defaults = {role: tokenizer.token(id) for role, id in ids.items() if id is not None}
    return defaults | role_texts(read_settings(folder))


def read_chat_template(
    folder: Path,
    file: str | None,
    special_tokens: Mapping[str, str],
    date: datetime.date | None = None,
) -> ChatTemplate:
    """Reads the chat template of a tokenizer's folder, or another file."""
    if file is not None and not Path(file).exists():
        raise InputError(
            f"the chat template {file}, which renders the data, is missing: put it "
            f"back, or give a copy by {how_to_set(CHAT_TEMPLATE, 'FILE')}"
        )
    if file is None:
        origin, named = _folder_templates(folder)
    else:
        origin, named = file, {"default": _read_text(Path(file))}
    template = ChatTemplate(
        named["default"], special_tokens, origin, date, named.get("tool_use")
    )
    template.check()
    return template


def _folder_templates(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the file and the texts of a folder's templates, by their names."""
    if not (folder / TEMPLATE_FILE).is_file():
        named = _named_templates(folder)
        if "default" not in named and is_gguf(folder):
            raise InputError(
                f"{folder} has no tokenizer.chat_template: use the file of a chat "
                f"model; for training, {how_to_set('DataSource.chat_template', FILE)} "
                "names one elsewhere"
            )
        if "default" not in named:
            raise InputError(
                f"{folder / CONFIG_FILE} has no chat_template, and {folder} no "
                f"{TEMPLATE_FILE}: use the folder of a chat model, or put a chat "
                f"template there as {TEMPLATE_FILE}; for training, "
                f"{how_to_set('DataSource.chat_template', FILE)} names one elsewhere"
            )
        return str(folder if is_gguf(folder) else folder / CONFIG_FILE), named
    named = {"default": _read_text(folder / TEMPLATE_FILE)}
    if (folder / TOOL_TEMPLATE_FILE).is_file():
        named["tool_use"] = _read_text(folder / TOOL_TEMPLATE_FILE)
    return str(folder / TEMPLATE_FILE), named


def _named_templates(folder: Path) -> dict[str, str]:
    """Returns the templates in a folder's settings or a GGUF file, by their names.

    Processors of images had their only one in `chat_template.json`.
    """
    if is_gguf(folder):
        named = read_gguf_templates(folder)
        return {name: text for name, text in named.items() if isinstance(text, str)}
    files = (folder / name for name in (CONFIG_FILE, PROCESSOR_FILE))
    found = (read_json_object(file).get("chat_template") for file in files)
    template = next((x for x in found if x is not None), None)
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(x.get("name")): x.get("template") for x in entries}
    else:
        named = template if isinstance(template, dict) else {"default": template}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _read_text(file: Path) -> str:
    try:
        return read_limited(file, MAXIMUM_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def turn_ends(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the special tokens that a template writes after an answer.

    There may be one after a text and another after calls of tools, and none if the
    template rejects the conversations that are tried.
    """
    ends = _end_of_text(template, tokenizer) + _end_of_calls(template, tokenizer)
    return list(dict.fromkeys(ends))


def _end_of_text(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the token after the text of an answer, if it is special."""
    text = _render(template, {"content": ANSWER})
    before, _, after = text.rpartition(ANSWER)
    ids = tokenizer.encode(after.strip()) if before else []
    return [id for id in ids[:1] if _is_special(tokenizer, id)]


def _end_of_calls(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the last token after calls of tools, if it only follows the last one."""
    for names in (CALLS, CALLS[:1]):
        calls = [_call(name) for name in names]
        text = _render(template, {"content": None, "tool_calls": calls})
        if CALLS[0] in text:
            break
    else:
        return []
    after = text.rpartition(names[-1])[2] if names[-1] in text else text
    ids = tokenizer.encode(after.strip())
    between = text.partition(CALLS[0])[2].partition(CALLS[1])
    if not ids or not _is_special(tokenizer, ids[-1]):
        return []
    if between[1] and tokenizer.token(ids[-1]) in between[0]:
        return []
    return ids[-1:]


def _call(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"a": 1}}
    return {"id": "abcdefghi", "type": "function", "function": function}


def _render(template: ChatTemplate, answer: dict[str, Any]) -> str:
    """Returns a conversation with an answer; nothing if the template rejects it."""
    messages = {"role": "user", "content": "question"}, {"role": "assistant", **answer}
    tools = None
    if "tool_calls" in answer:
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
        tools = [
            {
                "type": "function",
                "function": {"name": n, "description": n, "parameters": parameters},
            }
            for n in CALLS
        ]
    record = ChatRecord(messages, (False, True), tools)
    (text,) = template.render_many("text", [record])
    return text[0] if isinstance(text, tuple) else ""


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
    """Tests whether a token is special, and so never a part of an answer's text."""
    return token in hidden_tokens(tokenizer).values()
