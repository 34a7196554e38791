"""Encodes GPT-2's byte-level BPE word by word with a cache of words.

The tokenizer splits a text into words by a regular expression, and no token spans two
words. So the ids of a text are the ids of its words, one after another. Python's `re`
finds the words, and the tokenizer encodes each distinct word once. The character
classes of the expression (letters, numbers, white space) come from Python's Unicode
tables. If another version of Unicode may classify a character differently, the whole
text goes to the tokenizer.
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
MAXIMUM_ADDED_TOKENS = 64

_PLANE = 0x10000
_EMOJI = "\U0001f300-\U0001faff"
"""Emoji: the only characters outside the first plane that are matched here.

`re` looks up a class of first-plane characters in a table; it tests the ranges of any
other class one by one.
"""

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_PROBE = (
    "I'll  say: it's 3½ o'clock,\n\n “naïve” x_1 ² – Ⅷ\t' d'être\u00a0… 東京 2\r\n  "
)

Ids = tuple[int, ...]


class CachedBPE:
    """Encodes texts exactly as the tokenizer does; see `cached_bpe`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, added: Sequence[str]):
        def encode(text: str) -> Ids:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        self._encode = encode
        self._ids_of = _WordIds(encode)
        self._words, self._is_stable = _expressions()
        # Without added tokens, the pattern `(?!)` never matches.
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)").search

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a text, without special tokens."""
        stable = text.isascii() or self._is_stable(text)
        if not stable or self._added(text):
            return list(self._encode(text))
        ids_of = self._ids_of.__getitem__
        return list(itertools.chain.from_iterable(map(ids_of, self._words(text))))


class _WordIds(dict[str, Ids]):
    """Ids by word, a cache of at most `CACHED_WORDS` words."""

    def __init__(self, encode: Callable[[str], Ids]):
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> Ids:
        ids = self._encode(word)
        if len(self) < CACHED_WORDS and len(word) <= LONGEST_CACHED:
            self[word] = ids
        return ids


def cached_bpe(tokenizer: tokenizers.Tokenizer) -> CachedBPE | None:
    """Returns an encoder for a tokenizer that splits texts like GPT-2's, else None."""
    settings = json.loads(tokenizer.to_str())
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    added = [token["content"] for token in settings.get("added_tokens", ())]
    splits_like_gpt2 = (
        settings.get("normalizer") is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
        and not pre_tokenizer.get("add_prefix_space", True)
        and settings["model"].get("type") == "BPE"
        and not settings["model"].get("dropout")
        and len(added) <= MAXIMUM_ADDED_TOKENS
    )
    if not splits_like_gpt2:
        return None
    encoder = CachedBPE(tokenizer, added)
    expected = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return encoder if encoder(_PROBE) == expected else None


@functools.cache
def _expressions() -> tuple[Callable[[str], list[str]], Callable[[str], object]]:
    """Returns a function that splits a text into words, and one that tests a text.

    The test tells whether all versions of Unicode split the text equally. The
    alternatives are in GPT-2's order except for letters, which come first because no
    other alternative starts with them.
    """
    categories = [unicodedata.category(chr(code)) for code in range(_PLANE)]
    category_in_3_2 = unicodedata.ucd_3_2_0.category
    letters = _ranges([category[0] == "L" for category in categories])
    numbers = _ranges([category[0] == "N" for category in categories])
    # A letter or number of Unicode 3.2 remains one in later versions, and an assigned
    # character that is neither remains neither; the rest depends on the version.
    stable = _ranges(
        [
            category != "Cn"
            and (
                category[0] not in "LN" or category_in_3_2(chr(code))[0] == category[0]
            )
            for code, category in enumerate(categories)
        ]
    )
    words = (
        rf" ?[{letters}]+|'(?:[stmd]|re|ve|ll)| ?[{numbers}]+"
        rf"| ?[^{_SPACE}{letters}{numbers}]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )
    is_stable = re.compile(f"[{stable}{_EMOJI}]*").fullmatch
    return re.compile(words).findall, is_stable


def _ranges(inside: Sequence[bool]) -> str:
    spans: list[str] = []
    code = 0
    for value, group in itertools.groupby(inside):
        size = len(list(group))
        if value:
            spans.append(f"\\U{code:08x}-\\U{code + size - 1:08x}")
        code += size
    return "".join(spans)
