"""Templates of text and prompt vectors: `{soft:20} Review: {text} {soft:5} Mood:`.

A template makes the prompt of an example: the text before the completion in a
decoder-only model, or the encoder's input. It consists of

- text, with `{{` and `}}` for braces,
- `{key}`, the text under a key of a jsonl line,
- `{soft:5}`, five prompt vectors; `{soft:5:"words"}`, five that start from the
  embeddings of the words; `{soft:"words"}`, one for each token of the words. The
  quoted words are a JSON string.

The prompt vectors are used in order, beginning with the first soft part.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text.tokenizers import Tokenizer, encode_consecutive

_WORDS = r'"(?:[^"\\]|\\.)*"'
_SOFT = re.compile(rf"\{{soft:(?:(\d+)(?::({_WORDS}))?|({_WORDS}))\}}", re.DOTALL)
_KEY = re.compile(r'\{((?!soft\b)[^{}"]+)\}')
_PLAIN = re.compile(r"[^{}]+")

MAXIMUM_DIGITS = 6
"""Maximum number of digits of the number of vectors of a soft part."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Literal text."""

    text: str


@dataclasses.dataclass(frozen=True)
class Key:
    """The text that a jsonl line contains under a key."""

    name: str


@dataclasses.dataclass(frozen=True)
class Soft:
    """Prompt vectors.

    `count` is None for one vector for each token of the `words`. The embeddings of the
    words initialize the vectors, or else the prompt's initializer does.
    """

    count: int | None
    words: str | None = None


TemplatePart = Text | Key | Soft


@dataclasses.dataclass(frozen=True)
class Template:
    """The parts of a template, in order."""

    parts: tuple[TemplatePart, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that a jsonl line must have, without repetition, in order."""
        names = [part.name for part in self.parts if isinstance(part, Key)]
        return tuple(dict.fromkeys(names))

    @property
    def soft(self) -> tuple[Soft, ...]:
        """The soft parts."""
        return tuple(part for part in self.parts if isinstance(part, Soft))

    def without_soft(self) -> "Template":
        """Returns the template without prompt vectors, for a model without a prompt."""
        return Template(tuple(p for p in self.parts if not isinstance(p, Soft)))

    def render(self, texts: Mapping[str, str]) -> list[str]:
        """Returns the texts before, between and after the soft parts, even if empty."""
        rendered = [""]
        for part in self.parts:
            if isinstance(part, Soft):
                rendered.append("")
            else:
                rendered[-1] += (
                    part.text if isinstance(part, Text) else texts[part.name]
                )
        return rendered


def parse_template(template: str, setting: str = "DataSource.template") -> Template:
    """Parses a template; the message about an error gives the character, from 1."""
    parts: list[TemplatePart] = []
    start = 0
    while start < len(template):
        try:
            part, stop = _parse_part(template, start)
        except InputError as error:
            raise InputError(f"{setting}, {error}") from error
        previous = parts[-1] if parts else None
        if isinstance(part, Text) and isinstance(previous, Text):
            parts[-1] = Text(previous.text + part.text)
        else:
            parts.append(part)
        start = stop
    return Template(tuple(parts))


def _parse_part(template: str, start: int) -> tuple[TemplatePart, int]:
    if template.startswith(("{{", "}}"), start):
        return Text(template[start]), start + 2
    if match := _PLAIN.match(template, start):
        return Text(match[0]), match.end()
    if match := _KEY.match(template, start):
        return Key(match[1]), match.end()
    if match := _SOFT.match(template, start):
        return _parse_soft(template, start, match), match.end()
    if template[start] == "}":
        raise _error(
            template, start, "no '{' before it; for a brace of the text write '}}'"
        )
    if template.startswith("{soft", start):
        forms = '{soft:5}, {soft:"words"} or {soft:5:"words"}'
        raise _error(template, start, f"expected {forms}")
    raise _error(
        template,
        start,
        "expected {key}, a key of each line, or {soft:5}; for a brace of the text "
        "write '{{'",
    )


def _parse_soft(template: str, start: int, match: re.Match[str]) -> Soft:
    digits = match[1]
    if digits is not None and len(digits.lstrip("0")) > MAXIMUM_DIGITS:
        raise _error(
            template,
            start,
            f"the number of vectors has {len(digits):,} digits, expected at most "
            f"{MAXIMUM_DIGITS}",
        )
    count = None if digits is None else int(digits.lstrip("0") or 0)
    words = match[2] or match[3]
    if count == 0:
        raise _error(template, start, "expected at least one vector")
    if words is None:
        return Soft(count)
    try:
        text = json.loads(words, strict=False)
    except ValueError as error:
        reason = f"{words} is not a JSON string: {error}"
        raise _error(template, start, reason) from error
    if not text.strip():
        raise _error(
            template,
            start,
            "the words are empty, so no vector can be initialized from them",
        )
    return Soft(count, text)


def _error(template: str, start: int, reason: str) -> InputError:
    excerpt = template[start : start + 20]
    return InputError(f"character {start + 1}, {excerpt!r}: {reason}")


def soft_counts(template: Template, tokenizer: Tokenizer | None) -> list[int]:
    """Returns the numbers of vectors of the soft parts.

    The tokenizer counts the tokens of words, unless every count is given.
    """
    counts = []
    for part in template.soft:
        count = part.count
        if count is None:
            if tokenizer is None:
                raise InputError(
                    f"the template has {{soft:{json.dumps(part.words)}}} without a "
                    "count, and the model has no tokenizer to count its tokens: write "
                    "the count before the words, or name a tokenizer by "
                    f"{how_to_set('Pretrained.tokenizer', 'PATH')}"
                )
            count = len(tokenizer.encode(part.words or ""))
            if not count:
                raise InputError(
                    f"the template's soft part {part.words!r} has no tokens, and so "
                    "no vectors: use other words, or write a count before them"
                )
        counts.append(count)
    return counts


def check_length(counts: Sequence[int], length: int) -> None:
    """Refuses a template with more or fewer vectors than the prompt."""
    if sum(counts) != length:
        raise InputError(
            f"the template has {sum(counts)} soft vectors "
            f"({' + '.join(map(str, counts)) or 'no soft part'}), but the prompt has "
            f"{length}: give {how_to_set('SoftPrompt.length', sum(counts))}, or change "
            "the template"
        )


@dataclasses.dataclass(frozen=True)
class TokenTemplate:
    """A template encoded as token ids of a model.

    Prompt vector `j` is encoded as id `vocabulary_size + j`, a *soft id*. In an
    encoder-decoder a completion is a separate text, rather than the continuation of the
    prompt.
    """

    template: Template
    tokenizer: Tokenizer
    vocabulary_size: int
    separate: bool = False

    @functools.cached_property
    def counts(self) -> list[int]:
        """Numbers of vectors of the soft parts; see `soft_counts`."""
        return soft_counts(self.template, self.tokenizer)

    @property
    def length(self) -> int:
        """Total number of vectors, `P`."""
        return sum(self.counts)

    def check_length(self, length: int) -> None:
        """Checks that the prompt has `length` vectors; see `check_length`."""
        check_length(self.counts, length)

    def encode_text(self, text: str) -> list[int]:
        """Encodes a prompt with `text` under its only key."""
        keys = self.template.keys
        if len(keys) != 1:
            raise InputError(
                f"DataSource.template has the keys {shown(list(keys))}, expected one, "
                "such as {text}, to insert the text"
            )
        return self.encode_prompt({keys[0]: text})

    def encode_prompt(self, texts: Mapping[str, str]) -> list[int]:
        """Encodes a prompt, without special tokens, given the texts of its keys."""
        return self._insert_soft_ids(self._encode(self.template.render(texts)))

    def encode_pair(
        self, texts: Mapping[str, str], completion: str
    ) -> tuple[list[int], list[int]]:
        """Encodes a prompt and its completion.

        Text between two soft parts is encoded as one string. The ids without soft ids
        decode to the exact text; see `encode_consecutive`. A token outside the model's
        vocabulary is refused, because it would be mistaken for a prompt vector.
        """
        if self.separate:
            return self.encode_prompt(texts), self._encode([completion])[0]
        *prompt, answer = self._encode([*self.template.render(texts), completion])
        return self._insert_soft_ids(prompt), answer

    def _insert_soft_ids(self, encoded: Sequence[list[int]]) -> list[int]:
        """Joins the encoded texts with the soft ids between them."""
        ids, first = list(encoded[0]), self.vocabulary_size
        for count, text_ids in zip(self.counts, encoded[1:], strict=True):
            ids += [*range(first, first + count), *text_ids]
            first += count
        return ids

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = encode_consecutive(self.tokenizer, texts)
        largest = max((id for ids in encoded for id in ids), default=0)
        if largest >= self.vocabulary_size:
            raise InputError(
                f"a text contains token {largest}, expected 0 to "
                f"{self.vocabulary_size - 1} (the vocabulary); does the tokenizer "
                "belong to this model?"
            )
        return encoded
