"""Encoding of a text that continues another, without a space before it."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.data.text.tokenizers import Tokenizer

SPACE_MARKS = ("\u2581", "\u0120")
"""Characters for a leading space in vocabularies: sentencepiece, byte-level BPE."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A text to encode before a continuation, and its ids, which are then removed."""

    text: str
    ids: list[int]


def find_anchor(tokenizer: "Tokenizer", entries: Sequence[str]) -> Anchor | None:
    """Finds an anchor; returns None if the tokenizer puts no space before a text.

    The anchor is a character that occurs in vocabulary entries only at their end. No
    token therefore spans the boundary after it, and the text that follows is encoded as
    if it stood alone.
    """
    first = tokenizer.encode("a")
    if not first or not tokenizer.token(first[0]).startswith(SPACE_MARKS):
        return None
    inside = set("".join(entry[:-1] for entry in entries))
    single = [entry for entry in entries if len(entry) == 1 and entry not in inside]
    # Punctuation first: a letter could merge with an accent that begins the text.
    for character in sorted(single, key=str.isalnum):
        ids = tokenizer.encode(character)
        if ids and tokenizer.decode(ids) == character:
            return Anchor(character, ids)
    raise InputError(
        "this tokenizer puts a space before every text, and has no character after "
        "which a completion can be encoded: use separate texts (an encoder-decoder "
        "model) or a tokenizer without a dummy prefix"
    )


def encode_after(tokenizer: "Tokenizer", anchor: Anchor | None, text: str) -> list[int]:
    """Encodes a text after an anchor, if the tokenizer needs one.

    Raises:
      InputError: if the text merges with the anchor.
    """
    if not text or anchor is None:
        return tokenizer.encode(text)
    ids = tokenizer.encode(anchor.text + text)
    if ids[: len(anchor.ids)] != anchor.ids:
        raise InputError(
            f"the text {text[:20]!r} merges with the character before it, so it cannot "
            "be encoded as a completion: begin it with another character"
        )
    return ids[len(anchor.ids) :]
