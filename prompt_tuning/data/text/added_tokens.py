"""Tokens that files next to a tokenizer add to its vocabulary.

transformers writes them into `tokenizer.json`, and earlier into `added_tokens.json`,
`special_tokens_map.json` or the `added_tokens_decoder` of `tokenizer_config.json`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.text import special_tokens

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
SWITCHES = ("add_bos_token", "add_eos_token")
"""Settings that are no tokens in spite of their names."""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
MAXIMUM_ID = 2**24


@dataclasses.dataclass(frozen=True)
class FolderTokens:
    """The tokens that the files next to a tokenizer define.

    Attributes:
      declared: tokens by id.
      roles: a token's text, or the token with its flags, by role, such as `eos_token`.
      further: special tokens without a role; None if no file lists them.
      in_map: whether only `special_tokens_map.json` lists them, by the older name.
      source: file that declares the ids, for messages.
    """

    declared: "Mapping[int, tokenizers.AddedToken]"
    roles: "Mapping[str, str | tokenizers.AddedToken]"
    further: "Sequence[str | tokenizers.AddedToken] | None"
    in_map: bool
    source: str

    def text(self, role: str) -> str | None:
        """Returns the text of the token with a role, or None."""
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


def read_folder_tokens(folder: Path) -> FolderTokens:
    """Reads the tokens that the files of a folder define."""
    config = _object(folder / special_tokens.CONFIG_FILE)
    roles, listed = _roles(config), _lists(config)
    in_map = False
    declared: dict[int, tokenizers.AddedToken] = {}
    source = config.source
    if DECODER in config:
        decoder = config.nested(DECODER)
        for id in decoder.values:
            declared[_id(decoder, id)] = _token(decoder, id)
    else:
        older = _object(folder / special_tokens.MAP_FILE)
        roles |= _roles(older)
        in_map = not listed and LISTS[0] not in older
        listed = [*(listed or ()), *(_lists(older) or ())] if listed else _lists(older)
        texts = [token for token in (*roles.values(), *(listed or ())) if token]
        added = _object(folder / ADDED_FILE)
        source = added.source
        declared = _read_added(added, set(map(text_of, texts)))
    by_text = {token.content: token for token in declared.values()}
    flagged: dict[str, Any] = {
        role: by_text.get(text_of(token), token)
        for role, token in roles.items()
        if token is not None
    }
    return FolderTokens(declared, flagged, listed, in_map, source)


def add_tokens(
    tokenizer: "tokenizers.Tokenizer",
    tokens: FolderTokens,
    further: "Iterable[str | tokenizers.AddedToken]",
    main_file: str,
) -> None:
    """Adds tokens to a tokenizer in the order of transformers.

    `further` are special tokens without a role, and `main_file` has the vocabulary. A
    token must get the id that its file declares.
    """
    import tokenizers

    names = {text_of(token) for token in tokens.roles.values()}
    stored = tokenizer.get_added_tokens_decoder().values()
    wanted: list[tokenizers.AddedToken | str] = [
        token for _, token in sorted(tokens.declared.items())
    ]
    present = {text_of(token) for token in (*stored, *wanted)}
    # A role makes a token special, whatever its file says.
    wanted += [x for x in stored if not x.special and x.content in names]
    ordered = sorted(tokens.roles, key=lambda role: [*ROLES, role].index(role))
    for token in (*(tokens.roles[role] for role in ordered), *further):
        if text_of(token) not in present:
            present.add(text_of(token))
            wanted.append(token)
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
                f"{tokens.source} declares the added token {shown(text)} with the id "
                f"{id}, but the next one after the vocabulary of {main_file} is "
                f"{actual}: the ids of added tokens must continue it without a gap"
            )


def text_of(token: "str | tokenizers.AddedToken") -> str:
    """Returns the text of a token."""
    return token if isinstance(token, str) else token.content


def _object(file: Path) -> JsonObject:
    return JsonObject(str(file), special_tokens.read_json_object(file))


def _roles(content: JsonObject) -> dict[str, Any]:
    """Returns the tokens with a role in a file; None for a role without a token."""
    names = [name for name in content.values if name.endswith("_token")]
    roles = {name: _entry(content, name) for name in names if name not in SWITCHES}
    for name in LISTS:
        if isinstance(content.value(name, None), dict):
            named = content.nested(name)
            roles |= {role: _entry(named, role) for role in named.values}
    return roles


def _lists(content: JsonObject) -> list[Any] | None:
    """Returns the tokens without a role that a file lists; None if it lists none."""
    for name in LISTS:
        if name in content and not isinstance(content.value(name), dict):
            values = {str(i): x for i, x in enumerate(content.sequence(name))}
            entries = JsonObject(f"{name} in {content.source}", values)
            tokens = [_entry(entries, index) for index in values]
            if tokens:
                return [token for token in tokens if token is not None]
    return None


def _entry(content: JsonObject, name: str) -> Any:
    """Returns a token given as a text, or as an object with its flags."""
    value = content.value(name, None)
    if isinstance(value, str):
        return _whole(content, name, value)
    if value is None or (name.endswith("_token") and name not in ROLES):
        return None if not isinstance(value, dict) else _token(content, name)
    return _token(content, name)


def _whole(content: JsonObject, name: str, text: str) -> str:
    """Returns a text, without half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        content.refuse(name, "a text of whole characters")
    return text


def _token(content: JsonObject, name: str) -> "tokenizers.AddedToken":
    import tokenizers

    if not isinstance(content.value(name), dict):
        content.refuse(name, "a text, or an object with a text as its content")
    entry = content.nested(name)
    text = entry.value("content", None)
    if not isinstance(text, str):
        content.refuse(name, "a text, or an object with a text as its content")
    _whole(content, name, text)
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


def _read_added(
    content: JsonObject, special: set[str]
) -> "dict[int, tokenizers.AddedToken]":
    import tokenizers

    declared: dict[int, tokenizers.AddedToken] = {}
    for text in content.values:
        id: int = content.integer(_whole(content, text, text), maximum=MAXIMUM_ID)
        is_special = text in special
        declared[id] = tokenizers.AddedToken(
            text, normalized=not is_special, special=is_special
        )
    return declared
