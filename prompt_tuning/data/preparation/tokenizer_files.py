"""Many texts to ids at once, and a tokenizer with its special tokens changed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.chat_templates import TEMPLATE_FILE
from prompt_tuning.data.preparation.preparation_settings import TokenizerChoice
from prompt_tuning.data.preparation.word_encoder import word_encoder
from prompt_tuning.data.text.special_tokens import (
    CONFIG_FILE,
    MAP_FILE,
    ROLES,
    SpecialTokens,
    read_json_object,
    read_settings,
    role_texts,
)
from prompt_tuning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    continued_runs,
    load_tokenizer,
)

ADDITIONAL = "additional_special_tokens"
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
)
SETTINGS = (CONFIG_FILE, MAP_FILE, TEMPLATE_FILE)
MODEL_CONFIG = "config.json"
"""Names the kind of the model, which an output's metadata repeats."""

_PROBES = (" ", "\n", "\t")

Texts = Sequence[str]
"""Texts that continue each other."""


def open_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Reads the tokenizer and gives tokens the roles that are asked for.

    A token that is not in the vocabulary is added behind it.

    Raises:
      InputError: if it cannot be read, has no EOS, or takes no special tokens.
    """
    tokenizer = load_tokenizer(choice.path)
    if choice.special_tokens:
        tokenizer = _with_special_tokens(tokenizer, choice)
    if tokenizer.eos_id is None:
        raise InputError(
            f"the tokenizer {choice.path} names no EOS, which closes every article: "
            'name one with --special_tokens \'{"eos_token": "..."}\''
        )
    return tokenizer


def _with_special_tokens(tokenizer: Tokenizer, choice: TokenizerChoice) -> Tokenizer:
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise InputError(
            f"the tokenizer {choice.path} is a sentencepiece file, which takes no "
            "--special_tokens: use a folder with tokenizer.json"
        )
    _check_roles(choice)
    inner = tokenizer.tokenizer
    inner.add_special_tokens([token for _, token in choice.special_tokens])
    asked = {role: inner.token_to_id(token) for role, token in choice.special_tokens}
    own = SpecialTokens(*[asked.get(role) for role in ROLES], add_bos=None)
    return HuggingFaceTokenizer(inner, own.over(tokenizer.special))


def _check_roles(choice: TokenizerChoice) -> None:
    seen: set[str] = set()
    for role, token in choice.special_tokens:
        if role not in (*ROLES, ADDITIONAL):
            raise InputError(
                f"--special_tokens names {role!r}, expected "
                f"{', '.join((*ROLES, ADDITIONAL))}"
            )
        if role in seen and role != ADDITIONAL:
            raise InputError(
                f"--special_tokens gives {role!r} to {token!r} and to another token, "
                "expected one"
            )
        seen.add(role)


def special_texts(choice: TokenizerChoice, tokenizer: Tokenizer) -> dict[str, str]:
    """The texts of the tokens that have a role, as chat templates name them.

    Args:
      choice: which tokenizer, and the roles that are asked for.
      tokenizer: that tokenizer, opened; BOS and EOS may have no name but here.
    """
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    own = {role: tokenizer.token(id) for role, id in ids.items() if id is not None}
    asked = {role: text for role, text in choice.special_tokens if role != ADDITIONAL}
    return own | role_texts(read_settings(tokenizer_folder(choice))) | asked


def tokenizer_folder(choice: TokenizerChoice) -> Path:
    """Where a tokenizer lies, and the files that speak of it."""
    path = Path(choice.path)
    return path if path.is_dir() else path.parent


def tokenizer_files(choice: TokenizerChoice) -> list[Path]:
    """What an output takes from a tokenizer: it, and the files that speak of it.

    Other files of the folder, our own lock among them, are not.
    """
    config = tokenizer_folder(choice) / MODEL_CONFIG
    files = [*_kept_files(choice).values(), *([config] if config.is_file() else [])]
    return sorted(files)


def _kept_files(choice: TokenizerChoice) -> dict[str, Path]:
    """A tokenizer's files, by the names that a folder with it gives them.

    Where it is named as a file, others may lie beside it that a folder would be read
    by first: they are left out.
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
    else:
        files["tokenizer.json"] = path
    return {name: file for name, file in files.items() if file.is_file()}


def save_tokenizer(choice: TokenizerChoice, folder: Path) -> None:
    """Writes a folder that opens to the same tokenizer, its special tokens changed."""
    folder.mkdir()
    for name, file in _kept_files(choice).items():
        (folder / name).write_bytes(file.read_bytes())
    if choice.special_tokens:
        tokenizer = open_tokenizer(choice)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
        _write_roles(choice, tokenizer, folder)


def _write_roles(
    choice: TokenizerChoice, tokenizer: HuggingFaceTokenizer, folder: Path
) -> None:
    """Writes into the settings of a folder which tokens have a role."""
    special = tokenizer.special
    ids = dict(
        zip(ROLES, (special.bos_id, special.eos_id, special.pad_id), strict=True)
    )
    roles: dict[str, Any] = {
        role: None if id is None else tokenizer.token(id) for role, id in ids.items()
    }
    further = [token for role, token in choice.special_tokens if role == ADDITIONAL]
    for file in (folder / CONFIG_FILE, folder / MAP_FILE):
        is_config = file.name == CONFIG_FILE
        if not (is_config or file.is_file()):
            continue
        content = read_json_object(file) | roles
        if further:
            known = content.get(ADDITIONAL) or []
            content[ADDITIONAL] = [*known, *(t for t in further if t not in known)]
        if is_config:
            content["add_bos_token"] = tokenizer.add_bos
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")


class TextEncoder:
    """Encodes the texts of many passages in one call.

    Args:
      tokenizer: from text to ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._together = _texts_stand_alone(tokenizer)
        self._words = None
        if self._together:
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            self._words = word_encoder(tokenizer.tokenizer)

    def __call__(self, passages: Sequence[Texts]) -> list[list[list[int]]]:
        """The ids of each text of each passage.

        Raises:
          InputError: if a text cannot be encoded.
        """
        if not self._together:
            return [continued_runs(self._tokenizer, texts) for texts in passages]
        if self._words is not None:
            return [[self._word_ids(text) for text in texts] for texts in passages]
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)
        flat = [text for texts in passages for text in texts]
        found = iter(self._tokenizer.encode_many(flat))
        return [[next(found) for _ in texts] for texts in passages]

    def _word_ids(self, text: str) -> list[int]:
        assert self._words is not None
        try:
            return self._words(text)
        except Exception:  # the library raises nothing narrower; `encode` says more
            return self._tokenizer.encode(text)


def _texts_stand_alone(tokenizer: Tokenizer) -> bool:
    """Whether a text's ids are the same wherever it stands, and keep all its spaces.

    Then the texts of a passage can be encoded in any company. So it is in byte-level
    BPE; a tokenizer that puts a space first, or drops one last, must see neighbours.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    alone = tokenizer.encode("a")
    return tokenizer.encode_continuation("a") == alone and all(
        tokenizer.encode("a" + space) != alone for space in _PROBES
    )
