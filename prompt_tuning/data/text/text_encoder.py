"""Encodes many texts together."""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT
from prompt_tuning.data.text.cached_bpe import cached_bpe
from prompt_tuning.data.text.encoding_limits import check_text, reporting_errors
from prompt_tuning.data.text.learned_answers import TypedText
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import (
    HuggingFaceTokenizer,
    Tokenizer,
    encode_consecutive,
)

_PROBES = (" ", "\n", "\t")

TextParts = Sequence[str]
"""Consecutive parts of one continuous text."""


class _Divided(NamedTuple):
    """The sections of a text and of its beginnings, up to the ends of the parts.

    A beginning has some number of the sections of the text, and then its own.
    """

    whole: list[str]
    beginnings: list[tuple[int, list[str]]]

    def sections(self) -> Iterator[str]:
        return itertools.chain(self.whole, *(rest for _, rest in self.beginnings))


class TextSections:
    """Encodes texts and their beginnings, and each section of them once.

    A tokenizer of the library `tokenizers` first finds its added tokens, and encodes
    the text between two of them as if nothing else were there. So the ids of a text are
    the ids of its sections, one after another, if each but the first begins with such a
    token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[Sequence[str]], Sequence[list[int]]],
    ):
        self._encode = encode
        self._dividing: set[str] = set()
        self._tokens = re.compile(r"(?!)")  # never matches
        if isinstance(tokenizer, HuggingFaceTokenizer):
            added = tokenizer.tokenizer.get_added_tokens_decoder().values()
            found = [token for token in added if not token.normalized]
            # A token that depends on what is before it may be found anew in a section,
            # and one that has to end a word at the end of one, if a word follows it.
            self._dividing = {
                token.content
                for token in found
                if not (token.single_word or token.lstrip)
                if not re.match(r"\w", token.content)
            }
            longest_first = sorted((x.content for x in found), key=len, reverse=True)
            if found:
                self._tokens = re.compile("|".join(map(re.escape, longest_first)))

    def __call__(
        self, texts: Sequence[Sequence[str]]
    ) -> list[tuple[list[int], list[int] | None]]:
        """Returns ids by text, and their number by part; see `TextEncoder.joined`."""
        divided = [self._divide(parts) for parts in texts]
        distinct = list(dict.fromkeys(x for each in divided for x in each.sections()))
        ids_of = dict(zip(distinct, self._encode(distinct), strict=True))

        def ids(sections: Sequence[str]) -> list[int]:
            return list(
                itertools.chain.from_iterable(map(ids_of.__getitem__, sections))
            )

        def lengths(each: _Divided, whole: list[int]) -> list[int] | None:
            counts = [len(ids_of[section]) for section in each.whole]
            starts = [0, *itertools.accumulate(counts)]
            stops = [0]
            for number, sections in each.beginnings:
                rest = ids(sections)
                stops.append(starts[number] + len(rest))
                if whole[starts[number] : stops[-1]] != rest:
                    return None
            return [b - a for a, b in itertools.pairwise([*stops, len(whole)])]

        return [
            (whole, lengths(each, whole))
            for each in divided
            for whole in [ids(each.whole)]
        ]

    def _divide(self, parts: Sequence[str]) -> _Divided:
        text = "".join(parts)
        whole, cuts, ends = self._sections(text)
        beginnings = []
        for stop in itertools.accumulate(map(len, parts[:-1])):
            # A token that ends later might be another one in the beginning.
            number = bisect.bisect_right(ends, stop)
            start = cuts[number - 1] if number else 0
            beginnings.append((number, self._sections(text[start:stop])[0]))
        return _Divided(whole, beginnings)

    def _sections(self, text: str) -> tuple[list[str], list[int], list[int]]:
        """Returns the sections of a text, and bounds of the tokens that divide it."""
        tokens = [
            match.span()
            for match in self._tokens.finditer(text)
            if match.start() and match.group() in self._dividing
        ]
        cuts = [start for start, _ in tokens]
        bounds = [0, *cuts, len(text)] if text else []
        sections = [text[a:b] for a, b in itertools.pairwise(bounds)]
        return sections, cuts, [stop for _, stop in tokens]


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


@dataclasses.dataclass(frozen=True)
class RenderedText:
    """Consecutive typed texts, encoded as one continuous text.

    With `adds_bos`, the tokens that the model expects before a text are added.
    """

    parts: tuple[TypedText, ...]
    adds_bos: bool = True


@dataclasses.dataclass(frozen=True)
class TypedTokens:
    """Token ids with their types, 0 to 3.

    `repeated` counts tokens that another example of the same conversation has too.
    """

    input_ids: list[int]
    token_types: list[int]
    repeated: int = 0


class TypedTextEncoder:
    """Encodes rendered texts, each closed with EOS, which the tokenizer must have."""

    def __init__(self, tokenizer: Tokenizer):
        assert tokenizer.eos_id is not None
        self._encode_texts = TextEncoder(tokenizer)
        self._eos = tokenizer.eos_id
        self._begin = tokenizer.begin_ids

    def __call__(self, texts: Sequence[RenderedText]) -> list[TypedTokens]:
        """Returns the tokens by text; the EOS that closes a text has type 1."""
        encoded = self._encode_texts(
            [[text for text, _ in rendered.parts] for rendered in texts]
        )
        return [
            self._add_types(rendered, ids)
            for rendered, ids in zip(texts, encoded, strict=True)
        ]

    def _add_types(
        self, rendered: RenderedText, part_ids: Sequence[list[int]]
    ) -> TypedTokens:
        ids: list[int] = []
        types: list[int] = []
        if rendered.adds_bos:
            ids += self._begin
            types += [PROMPT] * len(self._begin)
        for (_, kind), tokens in zip(rendered.parts, part_ids, strict=True):
            ids += tokens
            types += [kind] * len(tokens)
        if not part_ids[-1] or ids[-1] != self._eos:
            ids.append(self._eos)
            types.append(COMPLETION)
        return TypedTokens(ids, types)


def until_last_answer(record: ChatRecord) -> ChatRecord:
    """Cuts a conversation after its last learned answer; it is empty without any.

    The messages after it would end with a learned separator although nothing answers
    them.
    """
    count = max((i for i, x in enumerate(record.learned, start=1) if x), default=0)
    return record._replace(
        messages=record.messages[:count], learned=record.learned[:count]
    )
