"""Prompts written as text with soft pieces: `{soft:20} Review: {text} {soft:5} Mood:`.

A template is what an example is given: a decoder-only model's text before the
completion, an encoder's input. It is made of

- text, with `{{` and `}}` for braces,
- `{key}`, the string that a jsonl line has under a key,
- `{soft:5}`, five vectors of the prompt; `{soft:5:"words"}`, five that start from the
  embeddings of words; `{soft:"words"}`, as many as the words have tokens. The quoted
  words are a JSON string.

Vectors are taken in order: the first soft piece has the prompt's first.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.tokenizers import Tokenizer, encode_consecutive

_WORDS = r'"(?:[^"\\]|\\.)*"'
_SOFT = re.compile(rf"\{{soft:(?:(\d+)(?::({_WORDS}))?|({_WORDS}))\}}", re.DOTALL)
_KEY = re.compile(r'\{((?!soft\b)[^{}"]+)\}')
_PLAIN = re.compile(r"[^{}]+")


@dataclasses.dataclass(frozen=True)
class Text:
    """Text as it stands."""

    text: str


@dataclasses.dataclass(frozen=True)
class Key:
    """A line's own text, under a key."""

    name: str


@dataclasses.dataclass(frozen=True)
class Soft:
    """Vectors of the prompt.

    Attributes:
      count: how many; None for as many as the words have tokens.
      words: what they start from; None for what the prompt's initialiser says.
    """

    count: int | None
    words: str | None = None


Piece = Text | Key | Soft


@dataclasses.dataclass(frozen=True)
class Template:
    """A template's pieces, in order."""

    pieces: tuple[Piece, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that a line must have, each once, in order."""
        names = [piece.name for piece in self.pieces if isinstance(piece, Key)]
        return tuple(dict.fromkeys(names))

    @property
    def soft(self) -> tuple[Soft, ...]:
        """The soft pieces."""
        return tuple(piece for piece in self.pieces if isinstance(piece, Soft))

    def without_soft(self) -> "Template":
        """The text alone, for a model without a prompt."""
        kept = [piece for piece in self.pieces if not isinstance(piece, Soft)]
        return Template(tuple(kept))

    def runs(self, texts: Mapping[str, str]) -> list[str]:
        """The texts before, between and after the soft pieces, empty ones too."""
        runs = [""]
        for piece in self.pieces:
            if isinstance(piece, Soft):
                runs.append("")
            else:
                found = piece.text if isinstance(piece, Text) else texts[piece.name]
                runs[-1] += found
        return runs


def parse_template(template: str, setting: str = "DataSource.template") -> Template:
    """Reads a template.

    Args:
      template: the text.
      setting: that it is the value of, for messages.

    Raises:
      InputError: with the character at which it cannot be read, counted from 1.
    """
    pieces: list[Piece] = []
    at = 0
    while at < len(template):
        try:
            piece, stop = _piece_at(template, at)
        except InputError as problem:
            raise InputError(f"{setting}, {problem}") from problem
        before = pieces[-1] if pieces else None
        if isinstance(piece, Text) and isinstance(before, Text):
            pieces[-1] = Text(before.text + piece.text)
        else:
            pieces.append(piece)
        at = stop
    return Template(tuple(pieces))


def _piece_at(template: str, at: int) -> tuple[Piece, int]:
    """The piece that begins at a character, and where the next one begins."""
    if template.startswith(("{{", "}}"), at):
        return Text(template[at]), at + 2
    if plain := _PLAIN.match(template, at):
        return Text(plain[0]), plain.end()
    if found := _KEY.match(template, at):
        return Key(found[1]), found.end()
    if found := _SOFT.match(template, at):
        return _soft(template, at, found), found.end()
    if template[at] == "}":
        raise _problem(
            template, at, "no '{' before it; for a brace of the text write '}}'"
        )
    if template.startswith("{soft", at):
        wanted = '{soft:5}, {soft:"words"} or {soft:5:"words"}'
        raise _problem(template, at, f"expected {wanted}")
    raise _problem(
        template,
        at,
        "expected {key}, a key of each line, or {soft:5}; for a brace of the text "
        "write '{{'",
    )


def _soft(template: str, at: int, found: re.Match[str]) -> Soft:
    count = None if found[1] is None else int(found[1])
    words = found[2] or found[3]
    if count == 0:
        raise _problem(template, at, "expected at least one vector")
    if words is None:
        return Soft(count)
    try:
        text = json.loads(words, strict=False)
    except ValueError as error:
        why = f"{words} is not a JSON string: {error}"
        raise _problem(template, at, why) from error
    if not text.strip():
        raise _problem(
            template, at, "the words are empty, so no vector can start from them"
        )
    return Soft(count, text)


def _problem(template: str, at: int, why: str) -> InputError:
    shown = template[at : at + 20]
    return InputError(f"character {at + 1}, {shown!r}: {why}")


def soft_counts(template: Template, tokenizer: Tokenizer | None) -> list[int]:
    """How many vectors each soft piece has.

    Args:
      template: what was parsed.
      tokenizer: counts the tokens of words; may be None where every count is written.

    Raises:
      InputError: if words without a count give no token, or there is no tokenizer.
    """
    counts = []
    for piece in template.soft:
        count = piece.count
        if count is None:
            if tokenizer is None:
                raise InputError(
                    f"the template has {{soft:{json.dumps(piece.words)}}} without a "
                    "count, and the model has no tokenizer to count its tokens: write "
                    "the count before the words, or set Pretrained.tokenizer"
                )
            count = len(tokenizer.encode(piece.words or ""))
            if not count:
                raise InputError(
                    f"the template's soft piece {piece.words!r} gives no token, so it "
                    "has no vector: use other words, or write a count before them"
                )
        counts.append(count)
    return counts


def check_length(counts: Sequence[int], length: int) -> None:
    """Refuses a prompt that has not as many vectors as the soft pieces together.

    Raises:
      InputError: with both numbers.
    """
    if sum(counts) != length:
        raise InputError(
            f"DataSource.template has {sum(counts)} soft vectors "
            f"({' + '.join(map(str, counts)) or 'no soft piece'}), but the prompt has "
            f"{length}: set its length (PROMPT_LENGTH) to {sum(counts)}, or change the "
            "template"
        )


@dataclasses.dataclass(frozen=True)
class TokenTemplate:
    """A template in the ids of a model's tokenizer.

    Vector `j` of the prompt is id `vocabulary_size + j`, a *soft id*.

    Attributes:
      template: its pieces.
      tokenizer: from text to ids.
      vocabulary_size: `V` of the model.
      separate: whether a completion is a text of its own (encoder-decoder), and does
        not continue the given one.
    """

    template: Template
    tokenizer: Tokenizer
    vocabulary_size: int
    separate: bool = False

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many vectors each soft piece has; see `soft_counts`."""
        return soft_counts(self.template, self.tokenizer)

    @property
    def length(self) -> int:
        """Vectors `P` of all soft pieces."""
        return sum(self.counts)

    def check_length(self, length: int) -> None:
        """Refuses a prompt of another length; see the function."""
        check_length(self.counts, length)

    def given_text(self, text: str) -> list[int]:
        """The ids of what is given, where a text is all there is to fill in.

        Raises:
          InputError: if the template has another number of keys than one.
        """
        keys = self.template.keys
        if len(keys) != 1:
            raise InputError(
                f"DataSource.template has the keys {list(keys)}, expected one, such as "
                "{text}, for the text to stand in"
            )
        return self.given({keys[0]: text})

    def given(self, texts: Mapping[str, str]) -> list[int]:
        """The ids of what is given, without special tokens."""
        return self._filled(self._encode(self.template.runs(texts)))

    def pair(
        self, texts: Mapping[str, str], completion: str
    ) -> tuple[list[int], list[int]]:
        """The ids of what is given, and of its completion.

        Text between two soft pieces is encoded as one string; all of it together, soft
        pieces aside, decodes to the exact text, as by `encode_consecutive`.

        Args:
          texts: by key.
          completion: the text to learn.

        Raises:
          InputError: if a token is not in the model's vocabulary, where it would be
            taken for a vector of the prompt.
        """
        if self.separate:
            return self.given(texts), self._encode([completion])[0]
        *runs, said = self._encode([*self.template.runs(texts), completion])
        return self._filled(runs), said

    def _filled(self, runs: Sequence[list[int]]) -> list[int]:
        """Runs of text with the soft ids between them."""
        given, first = list(runs[0]), self.vocabulary_size
        for count, run in zip(self.counts, runs[1:], strict=True):
            given += [*range(first, first + count), *run]
            first += count
        return given

    def _encode(self, runs: Sequence[str]) -> list[list[int]]:
        encoded = encode_consecutive(self.tokenizer, runs)
        largest = max((id for run in encoded for id in run), default=0)
        if largest >= self.vocabulary_size:
            raise InputError(
                f"a text gives token {largest}, expected 0 to "
                f"{self.vocabulary_size - 1} (the vocabulary); was the tokenizer made "
                "for this model?"
            )
        return encoded
