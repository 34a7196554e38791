"""Encodes many texts together."""

from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.cached_bpe import cached_bpe
from prompt_tuning.data.text.encoding_limits import check_text
from prompt_tuning.data.text.library_errors import reporting_errors
from prompt_tuning.data.text.text_sections import TextSections
from prompt_tuning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    encode_consecutive,
)

_PROBES = (" ", "\n", "\t")

TextParts = Sequence[str]
"""Consecutive parts of one continuous text."""


class TextEncoder:
    """Encodes the parts of many texts in one call."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._independent = _encodes_parts_independently(tokenizer)
        self._words = None
        if self._independent:
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            self._words = cached_bpe(tokenizer.tokenizer)
        self._sections = TextSections(tokenizer, self._encode_alone)

    def __call__(self, texts: Sequence[TextParts]) -> list[list[list[int]]]:
        """Returns the ids by text and by part."""
        for parts in texts:
            for part in parts:
                check_text(part)
        if not self._independent:
            return [encode_consecutive(self._tokenizer, parts) for parts in texts]
        ids = iter(self._encode_alone([part for parts in texts for part in parts]))
        return [[next(ids) for _ in parts] for parts in texts]

    def joined(
        self, texts: Sequence[TextParts]
    ) -> list[tuple[list[int], list[int] | None]]:
        """Encodes each text in one go, and counts the ids of its parts.

        The numbers are None if the text up to the end of some part, encoded alone, has
        other ids.
        """
        for parts in texts:
            check_text("".join(parts))
        return self._sections(texts)

    def _encode_alone(self, texts: Sequence[str]) -> list[list[int]]:
        if self._words is not None:
            return [self._word_ids(text) for text in texts]
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            return self._tokenizer.encode_many(texts)
        return [self._tokenizer.encode(text) for text in texts]

    def _word_ids(self, text: str) -> list[int]:
        assert self._words is not None
        try:
            with reporting_errors(lambda: "the text cannot be encoded"):
                return self._words(text)
        except InputError:  # `encode` reports which text it was
            return self._tokenizer.encode(text)


def _encodes_parts_independently(tokenizer: Tokenizer) -> bool:
    """Tests whether the ids of a part are independent, and keep all its spaces.

    Then the parts of all texts can be encoded in any order. This holds for byte-level
    BPE, but not for a tokenizer that prepends a space or drops a trailing one.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return False
    try:
        alone = tokenizer.encode("a")
        return tokenizer.encode_continuation("a") == alone and all(
            tokenizer.encode("a" + space) != alone for space in _PROBES
        )
    except InputError:  # a vocabulary without some of these characters
        return False
