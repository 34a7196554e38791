"""Opens a tokenizer with changed special tokens, and saves it with an output."""

import json
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.data.preparation.preparation_settings import TokenizerChoice
from prompt_tuning.data.text import gguf_tokenizer, tokenizer_building
from prompt_tuning.data.text.added_tokens import ADDED_FILE
from prompt_tuning.data.text.chat_templates import TEMPLATE_FILE, role_texts_of
from prompt_tuning.data.text.special_tokens import (
    CONFIG_FILE,
    MAP_FILE,
    ROLES,
    SpecialTokens,
    read_json_object,
)
from prompt_tuning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)

ADDITIONAL = "additional_special_tokens"
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
MODEL_CONFIG = "config.json"
"""File that names the model type, which an output's metadata repeats."""
SETTINGS = (CONFIG_FILE, MAP_FILE, ADDED_FILE, TEMPLATE_FILE, MODEL_CONFIG)


def open_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Loads a tokenizer that has an EOS, and assigns the requested roles to tokens.

    A token outside the vocabulary is appended to it.
    """
    tokenizer = load_tokenizer(choice.path)
    if choice.special_tokens:
        tokenizer = _with_special_tokens(tokenizer, choice)
    if tokenizer.eos_id is None:
        raise InputError(
            f"the tokenizer {choice.path} has no EOS token, which ends every example: "
            'set one with --special_tokens \'{"eos_token": "..."}\''
        )
    return tokenizer


def _with_special_tokens(tokenizer: Tokenizer, choice: TokenizerChoice) -> Tokenizer:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise InputError(
            f"the tokenizer {choice.path} does not support --special_tokens: use a "
            "folder with tokenizer.json"
        )
    _check_roles(choice)
    inner = tokenizer.tokenizer
    inner.add_special_tokens([token for _, token in choice.special_tokens])
    ids = {role: inner.token_to_id(token) for role, token in choice.special_tokens}
    begin = None
    if "bos_token" in ids and tokenizer.begin_ids == (tokenizer.bos_id,):
        text = dict(choice.special_tokens)["bos_token"]
        begin = tokenizer_building.put_before(inner, [text])
    changed = SpecialTokens(*[ids.get(role) for role in ROLES], begin_ids=begin)
    special = changed.fill_from(tokenizer.special)
    return HuggingFaceTokenizer(
        inner, special, costs=tokenizer.costs, cleans_spaces=tokenizer.cleans_spaces
    )


def _check_roles(choice: TokenizerChoice) -> None:
    assigned: set[str] = set()
    for role, token in choice.special_tokens:
        if role not in (*ROLES, ADDITIONAL):
            raise InputError(
                f"--special_tokens names {shown(role)}, expected "
                f"{', '.join((*ROLES, ADDITIONAL))}"
            )
        if role in assigned and role != ADDITIONAL:
            raise InputError(
                f"--special_tokens gives {shown(role)} to {shown(token)} and to "
                "another token, expected one token"
            )
        assigned.add(role)
        try:
            token.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"--special_tokens gives {shown(role)} to {shown(token)}, which has "
                "half a surrogate pair, expected a text of whole characters"
            ) from error


def special_texts(choice: TokenizerChoice, tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the texts of the special tokens by the names that chat templates use."""
    requested = {
        role: text for role, text in choice.special_tokens if role != ADDITIONAL
    }
    return role_texts_of(tokenizer, tokenizer_folder(choice)) | requested


def tokenizer_folder(choice: TokenizerChoice) -> Path:
    """Returns the folder of a tokenizer and of its settings, or its GGUF file."""
    path = Path(choice.path)
    return path if path.is_dir() or is_gguf(path) else path.parent


def tokenizer_files(choice: TokenizerChoice) -> list[Path]:
    """Returns the files that an output uses of a tokenizer's folder.

    Other files there, such as the lock of an output, are left out.
    """
    path = Path(choice.path)
    return [path] if is_gguf(path) else sorted(_files_to_save(choice).values())


def _files_to_save(choice: TokenizerChoice) -> dict[str, Path]:
    """Returns a tokenizer's files by the names that they have in a saved folder.

    If the tokenizer is given as a file, other tokenizer files next to it are left out,
    because they would take precedence when the folder is loaded.
    """
    path, folder = Path(choice.path), tokenizer_folder(choice)
    files = {name: folder / name for name in SETTINGS}
    if path.is_dir():
        files |= {name: path / name for name in FILES}
        files |= {file.name: file for file in path.glob("*.model")}
    elif path.suffix == ".model":
        files[path.name] = path
    elif path.name == "vocab.json":
        files |= {path.name: path, "merges.txt": folder / "merges.txt"}
    elif path.name == "vocab.txt":
        files[path.name] = path
    else:
        files["tokenizer.json"] = path
    return {name: file for name, file in files.items() if file.is_file()}


def save_tokenizer(choice: TokenizerChoice, folder: Path) -> None:
    """Writes a folder that loads as the same tokenizer with its changed tokens."""
    folder.mkdir()
    path = Path(choice.path)
    if is_gguf(path):
        _save_changed(choice, folder)
        template = gguf_tokenizer.read_gguf_templates(path)["default"]
        if template is not None:
            (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        return
    for name, file in _files_to_save(choice).items():
        (folder / name).write_bytes(file.read_bytes())
    if choice.special_tokens:
        _save_changed(choice, folder)


def _save_changed(choice: TokenizerChoice, folder: Path) -> None:
    """Writes a tokenizer as it is after all changes, with the roles of its tokens."""
    tokenizer = open_tokenizer(choice)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    _write_roles(choice, tokenizer, folder)


def _write_roles(
    choice: TokenizerChoice, tokenizer: HuggingFaceTokenizer, folder: Path
) -> None:
    special = tokenizer.special
    ids = dict(
        zip(ROLES, (special.bos_id, special.eos_id, special.pad_id), strict=True)
    )
    roles: dict[str, Any] = {
        role: None if id is None else tokenizer.token(id) for role, id in ids.items()
    }
    additional = [token for role, token in choice.special_tokens if role == ADDITIONAL]
    for file in (folder / CONFIG_FILE, folder / MAP_FILE):
        is_config = file.name == CONFIG_FILE
        if not (is_config or file.is_file()):
            continue
        content = read_json_object(file) | roles
        if additional:
            present = content.get(ADDITIONAL) or []
            new = [token for token in additional if token not in present]
            content[ADDITIONAL] = [*present, *new]
        if is_config:
            content["add_bos_token"] = bool(tokenizer.begin_ids)
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")
