"""GPT-2's byte-level BPE, word by word: what is seen again is not encoded again.

The tokenizer cuts a text into words by a regular expression, and no token spans two of
them; so the ids of a text are those of its words. Here the words are found by Python's
`re`, and the ids of each are asked of the tokenizer once. The classes of the expression
(letters, numbers, white space) are spelled out from Unicode's tables, and a text with a
character that another version of Unicode may class otherwise is left to the tokenizer.
"""

import functools
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Sequence

import tokenizers

CACHED_WORDS = 1 << 17
LONGEST_CACHED = 32
MOST_ADDED_TOKENS = 64

_PLANE = 0x10000
_PICTOGRAPHS = "\U0001f300-\U0001faff"
"""The only characters past the first plane that are not left to the tokenizer: emoji.
Classes without such characters are looked up in a table, others range by range."""

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_PROBE = (
    "I'll  say: it's 3½ o'clock,\n\n “naïve” x_1 ² – Ⅷ\t' d'être\u00a0… 東京 2\r\n  "
)

Ids = tuple[int, ...]


class WordEncoder:
    """Encodes texts as the tokenizer would; see `word_encoder`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, added: Sequence[str]):
        def encode(text: str) -> Ids:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        self._encode = encode
        self._ids_of = _WordIds(encode)
        self._words, self._is_known = _expressions()
        # Nothing is in no text, so without added tokens none is found.
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)").search

    def __call__(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        known = text.isascii() or self._is_known(text)
        if not known or self._added(text):
            return list(self._encode(text))
        ids_of = self._ids_of.__getitem__
        return list(itertools.chain.from_iterable(map(ids_of, self._words(text))))


class _WordIds(dict[str, Ids]):
    """The ids of words, at most `CACHED_WORDS` of them kept."""

    def __init__(self, encode: Callable[[str], Ids]):
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> Ids:
        ids = self._encode(word)
        if len(self) < CACHED_WORDS and len(word) <= LONGEST_CACHED:
            self[word] = ids
        return ids


def word_encoder(tokenizer: tokenizers.Tokenizer) -> WordEncoder | None:
    """An encoder for a tokenizer that cuts texts as GPT-2's does; None for others."""
    described = json.loads(tokenizer.to_str())
    before = described.get("pre_tokenizer") or {}
    added = [token["content"] for token in described.get("added_tokens", ())]
    cuts_like_gpt2 = (
        described.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True)
        and not before.get("add_prefix_space", True)
        and described["model"].get("type") == "BPE"
        and not described["model"].get("dropout")
        and len(added) <= MOST_ADDED_TOKENS
    )
    if not cuts_like_gpt2:
        return None
    encoder = WordEncoder(tokenizer, added)
    expected = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return encoder if encoder(_PROBE) == expected else None


@functools.cache
def _expressions() -> tuple[Callable[[str], list[str]], Callable[[str], object]]:
    """What finds the words of a text, and what tells if every version agrees on them.

    The order of the alternatives is GPT-2's but for letters, which come first: no other
    alternative begins as they do.
    """
    kinds = [unicodedata.category(chr(code)) for code in range(_PLANE)]
    before = unicodedata.ucd_3_2_0.category
    letters = _ranges([kind[0] == "L" for kind in kinds])
    numbers = _ranges([kind[0] == "N" for kind in kinds])
    # A letter or number that Unicode 3.2 had stays one; what is none, and assigned,
    # stays none; all else depends on the version.
    known = _ranges(
        [
            kind != "Cn" and (kind[0] not in "LN" or before(chr(code))[0] == kind[0])
            for code, kind in enumerate(kinds)
        ]
    )
    words = (
        rf" ?[{letters}]+|'(?:[stmd]|re|ve|ll)| ?[{numbers}]+"
        rf"| ?[^{_SPACE}{letters}{numbers}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )
    is_known = re.compile(f"[{known}{_PICTOGRAPHS}]*").fullmatch
    return re.compile(words).findall, is_known


def _ranges(inside: Sequence[bool]) -> str:
    """The characters for which it is true, as a class of a regular expression."""
    spans: list[str] = []
    code = 0
    for value, group in itertools.groupby(inside):
        size = len(list(group))
        if value:
            spans.append(f"\\U{code:08x}-\\U{code + size - 1:08x}")
        code += size
    return "".join(spans)
