"""Many texts to ids at once, and a tokenizer with its special tokens changed."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.data.preparation.settings import TokenizerChoice
from prompt_tuning.data.preparation.words import word_encoder
from prompt_tuning.data.tokenizers import (
    HuggingFaceTokenizer,
    SpecialTokens,
    Tokenizer,
    continued_runs,
    load_tokenizer,
)
from prompt_tuning.errors import InputError

ROLES = ("bos_token", "eos_token", "pad_token", "additional_special_tokens")
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
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
    for role, _ in choice.special_tokens:
        if role not in ROLES:
            raise InputError(
                f"--special_tokens names {role!r}, expected {', '.join(ROLES)}"
            )
    inner = tokenizer.tokenizer
    inner.add_special_tokens([token for _, token in choice.special_tokens])
    ids = {
        role.replace("_token", "_id"): inner.token_to_id(token)
        for role, token in choice.special_tokens
        if role != ROLES[-1]
    }
    own = SpecialTokens(
        tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.add_bos
    )
    return HuggingFaceTokenizer(inner, dataclasses.replace(own, **ids))


def tokenizer_files(choice: TokenizerChoice) -> list[Path]:
    """What an output takes from a tokenizer: it, and the files that speak of it.

    Other files of the folder, our own lock among them, are not.
    """
    path = Path(choice.path)
    folder = path if path.is_dir() else path.parent
    files = {folder / name for name in (*FILES, MODEL_CONFIG)}
    files |= set(folder.glob("*.model")) if path.is_dir() else {path}
    return sorted(file for file in files if file.is_file())


def save_tokenizer(choice: TokenizerChoice, folder: Path) -> None:
    """Writes a tokenizer's files into a folder, its special tokens changed."""
    folder.mkdir()
    source = Path(choice.path)
    files = [source] if source.is_file() else [source / name for name in FILES]
    for file in (*files, *([] if source.is_file() else sorted(source.glob("*.model")))):
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    if choice.special_tokens:
        tokenizer = open_tokenizer(choice)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        tokenizer.tokenizer.save(str(folder / "tokenizer.json"))


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
