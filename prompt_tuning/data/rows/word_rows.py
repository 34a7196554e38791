"""Rows of tagged words, e.g. of the names in a text (Tjong Kim Sang 2002).

A record has a list of words and a list of as many tags. The first token of a word is
learned, as in the examples of transformers. The row consists of the tokens that begin a
text, the tokens of the words (type 0), and as many numbers (type 1): the class that a
token should have plus one, or 0 if it is not learned.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.token_weights import COMPLETION, PROMPT
from prompt_tuning.data.rows.jsonl import JsonLine, TypedRow
from prompt_tuning.data.text.tokenizers import SPACE_MARKS, Tokenizer

WORDS, TAGS = ("tokens", "words"), ("tags", "ner_tags", "labels")
"""Keys of words and tags in records without the keys of `DataSource`."""
UNTAGGED = -100
"""Tag of a word that is not learned, in data sets for transformers."""


@dataclasses.dataclass(frozen=True)
class WordEncoder:
    """Encodes records of tagged words; see `RowEncoder`.

    Without `words_key` a record has one of `WORDS`, and without `tags_key` one of
    `TAGS`.
    """

    tokenizer: Tokenizer
    labels: Sequence[str]
    words_key: str | None
    tags_key: str

    def has_completion(self, line: JsonLine) -> bool:
        """Returns whether a word has a tag; see `RowEncoder`."""
        with line.locating_errors():
            return any(self._tags(line.content))

    def rows(self, lines: Sequence[JsonLine], add_eos: bool) -> list[list[TypedRow]]:
        """Encodes each record as a row; see `RowEncoder`."""
        del add_eos
        rows = []
        for line in lines:
            with line.locating_errors():
                rows.append([self._row(line.content)])
        return rows

    def _row(self, record: Mapping[str, Any]) -> TypedRow:
        words, tags = read_words(record, self.words_key), self._tags(record)
        if len(words) != len(tags):
            raise InputError(
                f"found {len(words)} words and {len(tags)} tags, expected a tag for "
                "each word"
            )
        ids, numbers = [], []
        for tag, pieces in zip(tags, encode_words(self.tokenizer, words), strict=True):
            ids += pieces
            numbers += [tag, *[0] * len(pieces)][: len(pieces)]
        begin = list(self.tokenizer.begin_ids)
        types = [PROMPT] * (len(begin) + len(ids)) + [COMPLETION] * len(numbers)
        row = np.array([*begin, *ids, *numbers], np.int32)
        return row, np.array(types, np.int32)

    def _tags(self, record: Mapping[str, Any]) -> list[int]:
        """Returns the class of every word plus one; 0 for a word without a tag."""
        key, given = _value(record, self.tags_key, TAGS, "DataSource.completion_key")
        given = given.split() if isinstance(given, str) else given
        if not isinstance(given, list):
            raise InputError(f"{key!r} is {shown(given)}, expected a list of tags")
        return [self._number(tag, key) for tag in given]

    def _number(self, tag: Any, key: str) -> int:
        if tag is None or tag == UNTAGGED:
            return 0
        names = [label.strip() for label in self.labels]
        if isinstance(tag, str) and tag.strip() in names:
            return names.index(tag.strip()) + 1
        if type(tag) is int and 0 <= tag < len(names):
            return tag + 1
        raise InputError(
            f"{key!r} has the tag {shown(tag)}, expected one of the labels "
            f"{shown(names)}, its number from 0, or null for a word without a tag"
        )


def read_words(record: Mapping[str, Any], key: str | None) -> list[str]:
    """Returns the words of a record; a text is split at white space."""
    key, given = _value(record, key, WORDS, "DataSource.prompt_key")
    given = given.split() if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(x, str) for x in given):
        raise InputError(f"{key!r} is {shown(given)}, expected a list of words")
    return given


def encode_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Encodes words as they are within a text: after a space, where that matters."""
    plain, spaced = (tokenizer.encode(text)[:1] for text in ("a", " a"))
    marks = [
        bool(x) and tokenizer.token(x[0])[:1] in SPACE_MARKS for x in (plain, spaced)
    ]
    before = " " if marks == [False, True] else ""
    return [tokenizer.encode(before + word) for word in words]


def _value(
    record: Mapping[str, Any], key: str | None, others: Sequence[str], setting: str
) -> tuple[str, Any]:
    for name in (key, *others):
        if name is not None and name in record:
            return name, record[name]
    raise InputError(
        f"found the keys {shown(sorted(record))}, expected "
        f"{' or '.join(map(repr, others))}; name the key by {setting}"
    )
