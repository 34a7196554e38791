"""The text that tokens add to those before them."""

from collections.abc import Sequence

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
