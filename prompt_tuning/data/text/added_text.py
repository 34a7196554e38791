"""The text that tokens add to those before them, and its bytes."""

import random
import re
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.utf8_text import common_beginning
from prompt_tuning.data.text.tokenizers import Tokenizer

INCOMPLETE = "\ufffd"
"""Text of bytes that are only a part of a character."""
CONTEXT_TOKENS = 6
"""Number of tokens before new ones that are decoded with them.

Sentencepiece drops the space before the first token of a text, and bytes of a character
may be several tokens.
"""
CHARACTER_BYTES = 4
"""Maximum number of bytes of a character, each of which may be a token."""
UNKNOWN = " \u2047 "
"""Text of sentencepiece's token for unknown characters."""
MAXIMUM_TOKEN = 1000
"""Maximum number of bytes of a token; longer ones are left out."""
CHECKED_ROWS = 200
CHECKED_TOKENS = 8
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def added_text(before: str, whole: str, complete: str | None = None) -> str:
    """Returns the text that `whole` adds to `before`, which may end within a character.

    `complete` is `before` without a part of a character at its end, if it has one; see
    `complete_text`.

    >>> added_text("a \ufffd", "a é b", "a ")
    'é b'
    """
    if whole.startswith(before):
        return whole[len(before) :]
    known = before if complete is None else complete
    return whole[len(common_beginning(known, whole)) :]


def complete_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decodes ids without the bytes of an incomplete character at their end."""
    for count in range(len(ids), max(len(ids) - CHARACTER_BYTES, -1), -1):
        text = tokenizer.decode(ids[:count])
        if not text.endswith(INCOMPLETE):
            return text
    return tokenizer.decode(ids)


def context_start(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns the first token that must be decoded with the next ones.

    It is not within a character, because some libraries decode no byte of a run of
    bytes if one is wrong.
    """
    latest = max(len(ids) - CONTEXT_TOKENS, 0)
    for start in range(latest, max(latest - CHARACTER_BYTES, -1), -1):
        if not tokenizer.decode(ids[start:]).startswith(INCOMPLETE):
            return start
    return latest


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Returns the bytes that each token adds after another one, for constraints.

    Special tokens, which add nothing, and tokens that no text has are empty. InputError
    if the text of a token depends on the tokens before it.
    """
    anchor = _find_anchor(tokenizer)
    before = tokenizer.decode([anchor])
    added = []
    for token in range(tokenizer.vocabulary_size):
        text = tokenizer.decode([anchor, token]).removeprefix(before)
        content = text.encode(errors="replace")
        if INCOMPLETE in text:
            content = entry_bytes(tokenizer.token(token))
        if text == UNKNOWN or len(content) > MAXIMUM_TOKEN:
            content = b""
        added.append(content)
    _check_independence(tokenizer, anchor, added)
    return added


def find_spaced(added: Sequence[bytes]) -> int | None:
    """Returns a token that is a space and a word, or None."""
    spaced = (i for i, each in enumerate(added) if re.fullmatch(rb" [a-z]+", each))
    return next(spaced, None)


def drops_space(tokenizer: Tokenizer, given: Sequence[int], token: int | None) -> bool:
    """Tests whether the space that a token begins with is dropped after given ids.

    Sentencepiece drops it at the beginning of a text, where it is the one that encoding
    inserts. `token` is the result of `find_spaced`.
    """
    if token is None:
        return False
    text = added_text(tokenizer.decode(given), tokenizer.decode([*given, token]))
    return not text.startswith(" ")


def _find_anchor(tokenizer: Tokenizer) -> int:
    """Returns a token with a plain text, to decode other tokens after."""
    for token in range(tokenizer.vocabulary_size):
        text = tokenizer.decode([token])
        if text.isascii() and text.isalnum():
            return token
    raise InputError(
        "no token of this tokenizer is a plain letter or digit, so that a regular "
        "expression or JSON schema cannot be followed: leave it out"
    )


def entry_bytes(entry: str) -> bytes:
    """Returns the bytes of a part of a character, from its entry in the vocabulary.

    They are empty if the entry does not tell them.
    """
    single = _BYTE.fullmatch(entry)
    if single:
        return bytes.fromhex(single[1])
    if all(character in _BYTE_LEVEL for character in entry):
        return bytes(_BYTE_LEVEL[character] for character in entry)
    return b""


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the bytes of the characters in vocabularies of byte-level BPE.

    Printable characters of Latin-1 stand for themselves, and the other bytes in their
    order for the characters from 256 on (GPT-2's `bytes_to_unicode`).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _check_independence(
    tokenizer: Tokenizer, anchor: int, added: Sequence[bytes]
) -> None:
    """Checks on random rows that the text of a row joins the texts of its tokens."""
    drawn = random.Random(0)
    tokens = [token for token, each in enumerate(added) if each]
    before = tokenizer.decode([anchor])
    for _ in range(CHECKED_ROWS if tokens else 0):
        row = drawn.choices(tokens, k=CHECKED_TOKENS)
        content = b"".join(added[token] for token in row)
        try:
            expected = content.decode()
        except UnicodeDecodeError:
            continue  # the libraries write incomplete characters differently
        if tokenizer.decode([anchor, *row]) != before + expected:
            raise InputError(
                "this tokenizer changes the text of a token by the tokens around it, "
                "so that a regular expression or JSON schema cannot be followed: leave "
                "it out"
            )
