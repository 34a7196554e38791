"""Tokens that are added to a vocabulary, read from the files next to a tokenizer.

transformers writes them into `tokenizer.json`, and earlier into `added_tokens.json`,
`special_tokens_map.json` or the `added_tokens_decoder` of `tokenizer_config.json`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.text.special_tokens import (
    CONFIG_FILE,
    read_json_object,
)

if TYPE_CHECKING:
    import tokenizers

ADDED_FILE = "added_tokens.json"
DECODER = "added_tokens_decoder"
ROLES = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
"""Roles in the order in which transformers adds their tokens."""
LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Names of the list of further special tokens; the second is the older one."""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
MAXIMUM_ID = 2**24

Token = "str | tokenizers.AddedToken"


@dataclasses.dataclass(frozen=True)
class FolderTokens:
    """The tokens that the files next to a tokenizer define.

    Attributes:
      declared: tokens by id.
      roles: a token's text, or the token with its flags, by role, such as `eos_token`.
      further: special tokens without a role; None if no file lists them.
      in_map: whether only `special_tokens_map.json` lists them, by the older name.
      source: folder, for messages.
    """

    declared: "Mapping[int, tokenizers.AddedToken]"
    roles: "Mapping[str, str | tokenizers.AddedToken]"
    further: "Sequence[str | tokenizers.AddedToken] | None"
    in_map: bool
    source: str

    def text(self, role: str) -> str | None:
        """Returns the text of the token with a role; None if there is none."""
        token = self.roles.get(role)
        return None if token is None else text_of(token)

    def raw(self) -> "FolderTokens":
        """Returns the same tokens, but found before the text is normalized."""
        import tokenizers

        changed: dict[int, tokenizers.AddedToken] = {}
        for id, token in self.declared.items():
            flags = {flag: getattr(token, flag) for flag in FLAGS}
            flags["normalized"] = False
            changed[id] = tokenizers.AddedToken(token.content, **flags)
        return dataclasses.replace(self, declared=changed)


def read_folder_tokens(folder: Path, settings: Mapping[str, Any]) -> FolderTokens:
    """Reads the tokens that the files of a folder define.

    Args:
      folder: folder of the tokenizer.
      settings: its settings; see `read_settings`.

    Raises:
      InputError: if a file is not as expected.
    """
    content = JsonObject(str(folder / CONFIG_FILE), settings)
    declared: dict[int, tokenizers.AddedToken] = {}
    if DECODER in content:
        decoder = content.nested(DECODER)
        for id in decoder.values:
            declared[_id(decoder, id)] = _token(decoder, id)
    roles, further = _named(content)
    written = read_json_object(folder / CONFIG_FILE)
    in_map = not any(written.get(name) for name in LISTS) and not settings.get(LISTS[0])
    if DECODER not in content:
        names = {text_of(token) for token in (*roles.values(), *(further or ()))}
        declared |= _read_added(folder / ADDED_FILE, names)
    by_text = {token.content: token for token in declared.values()}
    flagged: dict[str, Any] = {
        role: by_text.get(text_of(token), token) for role, token in roles.items()
    }
    return FolderTokens(declared, flagged, further, in_map, str(folder))


def add_tokens(
    tokenizer: "tokenizers.Tokenizer",
    tokens: FolderTokens,
    *,
    further: "Iterable[str | tokenizers.AddedToken]" = (),
) -> None:
    """Adds tokens to a tokenizer in the order in which transformers adds them.

    Args:
      tokenizer: tokenizer to change.
      tokens: tokens of the files.
      further: special tokens without a role.

    Raises:
      InputError: if a token gets another id than the one that its file declares.
    """
    import tokenizers

    present = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[tokenizers.AddedToken | str] = [
        token for _, token in sorted(tokens.declared.items())
    ]
    present |= {text_of(token) for token in wanted}
    ordered = sorted(tokens.roles, key=lambda role: [*ROLES, role].index(role))
    for token in (*(tokens.roles[role] for role in ordered), *further):
        if text_of(token) not in present:
            present.add(text_of(token))
            wanted.append(token)
    names = {text_of(token) for token in tokens.roles.values()}
    added: list[tokenizers.AddedToken] = []
    for token in wanted:
        if isinstance(token, str):
            token = tokenizers.AddedToken(token, special=True)
        elif text_of(token) in names:
            token.special = True
        added.append(token)
    new = {
        token.content: id
        for id, token in tokens.declared.items()
        if tokenizer.token_to_id(token.content) is None
    }
    tokenizer.add_tokens(added)
    for text, id in new.items():
        actual = tokenizer.token_to_id(text)
        if text and actual != id:
            raise InputError(
                f"{tokens.source}: the added token {shown(text)} is declared with the "
                f"id {id}, but the next free one is {actual}: the ids of added tokens "
                "must continue the vocabulary without a gap"
            )


def text_of(token: "str | tokenizers.AddedToken") -> str:
    """Returns the text of a token."""
    return token if isinstance(token, str) else token.content


def _named(content: JsonObject) -> "tuple[dict[str, Any], list[Any] | None]":
    """Returns the tokens with roles, and the further ones that are listed."""
    names = [name for name in content.values if name.endswith("_token")]
    names = [*ROLES, *(name for name in names if name not in ROLES)]
    roles: dict[str, Any] = {
        name: _entry(content, name) for name in names if name in content
    }
    further: list[Any] | None = None
    for name in LISTS:
        if name not in content:
            continue
        if isinstance(content.value(name), dict):
            named = content.nested(name)
            roles |= {role: _entry(named, role) for role in named.values}
        elif not further:
            listed = {str(i): x for i, x in enumerate(content.sequence(name))}
            entries = JsonObject(f"{name} in {content.source}", listed)
            further = [_entry(entries, index) for index in listed]
    return {k: v for k, v in roles.items() if v is not None}, further


def _entry(content: JsonObject, name: str) -> Any:
    """Returns a token given as a text, or as an object with its flags."""
    value = content.value(name, None)
    if value is None or isinstance(value, bool):
        return None
    return value if isinstance(value, str) else _token(content, name)


def _token(content: JsonObject, name: str) -> "tokenizers.AddedToken":
    """Returns the token that an object describes."""
    import tokenizers

    if not isinstance(content.value(name), dict):
        content.refuse(name, "a text, or an object with a text as its content")
    entry = content.nested(name)
    text = entry.value("content", None)
    if not isinstance(text, str):
        content.refuse(name, "a text, or an object with a text as its content")
    flags = {flag: entry.flag(flag) for flag in FLAGS if flag in entry}
    if name.endswith("_token"):
        flags["special"] = True
    return tokenizers.AddedToken(text, **flags)


def _id(decoder: JsonObject, id: str) -> int:
    if not (id.isascii() and id.isdecimal() and int(id) < MAXIMUM_ID):
        raise InputError(
            f"{decoder.source} has the key {shown(id)}, expected an id below "
            f"{MAXIMUM_ID:,}"
        )
    return int(id)


def _read_added(file: Path, special: set[str]) -> "dict[int, tokenizers.AddedToken]":
    """Reads `added_tokens.json`: ids by the texts of tokens."""
    import tokenizers

    content = JsonObject(str(file), read_json_object(file))
    declared: dict[int, tokenizers.AddedToken] = {}
    for text in content.values:
        id = content.integer(text, maximum=MAXIMUM_ID)
        is_special = text in special
        declared[id] = tokenizers.AddedToken(
            text, normalized=not is_special, special=is_special
        )
    return declared
