"""Texts to write rows about, cut into chunks or retrieved, and settings of the rows."""

import collections
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Mapping, Sequence

from prompt_tuning.core import number_ranges
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.data.text.chat_templates import has_chat_template
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.continue_rows import runs_in_slots
from prompt_tuning.pretrained.prompted_model import PromptedModel

GIVEN = 8
"""Maximum number of given tokens of a passage."""
SHORTEST = 8
"""Minimum number of learned tokens of a row."""
UNKNOWN = ("<unk>", "[UNK]")
"""Texts of the token for characters that a tokenizer does not know."""
PASSAGE, LINE, CONTINUATION = "passage", "line", "continuation"
LINES = (PASSAGE, LINE, CONTINUATION)
"""Kinds of rows of plain text."""
SEEDS = {
    "structure": "Ask one question about how this text is built: its parts, their "
    "order, or where something stands in it.",
    "summary": "Ask for a summary of one part of this text, and name the part.",
    "question": "Ask one precise question that this text answers, about a name, a "
    "number, a date or a detail.",
    "use": "Ask for help with a task for which someone needs what this text says.",
    "creative": "Ask for something imaginative that builds on facts of this text.",
}
"""Instructions that ask the model for a question, by kind of conversation."""
ALONE = (
    "Write the request alone, as a user would, so that it can be understood without "
    "the text."
)
SUMMARY = (
    "Write a summary of this text in at most {words} words. Name what matters most."
)
FOLLOWS = "Do not repeat what was asked before."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStudy:
    """How rows are made from texts.

    Attributes:
      rows: number of rows to learn from.
      held_out: number of additional rows to measure on.
      chunk: maximum number of tokens that the model reads before it writes; chunks end
        at the end of a paragraph where possible. None for whole texts.
      passage: maximum number of learned tokens of a row of plain text.
      answer: maximum number of tokens of an answer, and of a question.
      kinds: kinds of rows, in equal numbers: `LINES` for plain text, `SEEDS` for
        conversations. None for all of `SEEDS` if the model has a chat template, else
        all of `LINES`.
      rounds: number of questions per conversation; each of them is a row.
      reasoning: share of answers that start with reasoning, for chat templates with
        `enable_thinking`; None for the template's default. Make `answer` large enough
        for it.
      question_temperature: sampling temperature of questions.
      answer_temperature: sampling temperature of answers and lines.
      temperature: sampling temperature of free continuations.
      seed: seed of the passages and of sampling.

    Raises:
      InputError: if a kind is unknown.
    """

    rows: number_ranges.PositiveInteger = 1024
    held_out: number_ranges.NonnegativeInteger = 128
    chunk: number_ranges.PositiveInteger | None = None
    passage: number_ranges.PositiveInteger = 32
    answer: number_ranges.PositiveInteger = 256
    kinds: Sequence[str] | None = None
    rounds: number_ranges.PositiveInteger = 1
    reasoning: number_ranges.Share | None = None
    question_temperature: number_ranges.Temperature = 0.7
    answer_temperature: number_ranges.Temperature = 0.0
    temperature: number_ranges.Temperature = 1.0
    seed: number_ranges.NonnegativeInteger = 0

    def __post_init__(self):
        check_fields(self)
        for kind in self.kinds or ():
            if kind not in (*LINES, *SEEDS):
                raise InputError(
                    f"a kind of rows is {kind!r}, expected some of "
                    f"{', '.join((*LINES, *SEEDS))}"
                )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a text that the model reads before it writes."""

    name: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StudiedTexts:
    """Chunks that fit a model, with the lengths of their rows.

    `begin` are tokens that start each row, e.g. BOS; `given` (of a passage), `learned`
    (of plain text) and `answer` are maximum numbers of tokens.
    """

    chunks: tuple[Chunk, ...]
    begin: tuple[int, ...]
    kinds: tuple[str, ...]
    given: int
    learned: int
    answer: int


def read_texts(
    texts: Mapping[str, str], model: PromptedModel, study: TextStudy
) -> StudiedTexts:
    """Cuts texts into chunks that a model can read together with a row.

    Raises:
      InputError: if a text is too short, a chunk is too long for the model, or the
        model cannot write such rows.
    """
    _check_model(model)
    tokenizer = model.needed_tokenizer()
    kinds = _kinds(tokenizer, study)
    begin = tuple(model.interface.begin_ids)
    if len(begin) > 1:
        raise InputError(
            f"the tokenizer begins each text with {len(begin)} tokens, which belong "
            "together, and a text is put after one of them: choose another model"
        )
    if study.chunk is not None and study.chunk < SHORTEST:
        raise InputError(
            f"chunks have {study.chunk} tokens, expected at least {SHORTEST}: give "
            "larger chunks, or none to read the whole text"
        )
    chunks = [
        Chunk(name, tuple(ids))
        for name, text in texts.items()
        for ids in cut_text(text, tokenizer, study.chunk)
    ]
    shortest = min((len(chunk.ids) for chunk in chunks), default=0)
    if shortest < SHORTEST:
        raise InputError(
            f"a text or a chunk has {shortest} tokens, expected at least {SHORTEST}: "
            "give a longer text, or larger chunks"
        )
    longest = max(len(chunk.ids) for chunk in chunks)
    given_tokens = min(GIVEN, longest // 2)
    learned, answer = min(study.passage, longest - given_tokens), study.answer
    limit = model.config.maximum_positions
    if limit is not None:
        room = limit - len(begin) - longest - given_tokens
        if room < SHORTEST:
            raise InputError(
                f"the text has {longest} tokens, and the model {limit} positions"
                f"{model.config.positions_note}, which have to hold the text and a row "
                f"about it: give at most {longest + room - SHORTEST} tokens of the "
                "text, or cut it into chunks (--chunk)"
            )
        # A conversation has a question, the instruction to ask it, and its template.
        learned, answer = min(learned, room), max(min(answer, room // 4), 1)
    for chunk in chunks:
        _warn_of_unknown(chunk, tokenizer)
    return StudiedTexts(tuple(chunks), begin, kinds, given_tokens, learned, answer)


def _check_model(model: PromptedModel) -> None:
    """Checks that a model can continue a text and supports a prefix."""
    if model.config.architecture != "decoder_only" or model.config.bidirectional:
        kind = "encoder" if model.config.bidirectional else "encoder-decoder"
        raise InputError(
            "a memory is a key/value prefix of a decoder-only model, and this is an "
            f"{kind}: choose another model"
        )
    if not runs_in_slots(model):
        raise InputError(
            "a model writes about a text on one device that holds all its weights: "
            "leave out the mesh and streamed weights"
        )


def _kinds(tokenizer: Tokenizer, study: TextStudy) -> tuple[str, ...]:
    """Returns the kinds of rows."""
    chats = has_chat_template(tokenizer)
    if study.reasoning is not None and not chats:
        raise InputError(
            f"reasoning is {study.reasoning}, but the model has no chat template, so "
            "it answers no questions: leave it out"
        )
    if study.kinds is None:
        return tuple(SEEDS) if chats else LINES
    asked = [kind for kind in study.kinds if kind in SEEDS]
    if study.reasoning is not None and not asked:
        raise InputError(
            f"reasoning is {study.reasoning}, but rows of the kinds "
            f"{', '.join(study.kinds)} have no answers: leave it out, or choose kinds "
            f"among {', '.join(SEEDS)} (--kinds)"
        )
    if asked and not chats:
        raise InputError(
            f"rows of the kind {asked[0]!r} are conversations, and the model has no "
            f"chat template: choose among {', '.join(LINES)} (--kinds)"
        )
    return tuple(study.kinds)


def _warn_of_unknown(chunk: Chunk, tokenizer: Tokenizer) -> None:
    unknown = sum(tokenizer.token(token) in UNKNOWN for token in chunk.ids)
    if unknown:
        warnings.warn(
            f"{unknown} of the {len(chunk.ids)} tokens of {chunk.name} stand for "
            "characters that the tokenizer does not know: the memory cannot tell them "
            "apart",
            stacklevel=3,
        )


def cut_text(
    text: str, tokenizer: Tokenizer, length: int | None
) -> list[Sequence[int]]:
    """Cuts a text into chunks of similar length at ends of paragraphs.

    A paragraph longer than a chunk is cut at the ends of its lines, and a longer line
    between tokens.
    """
    whole = tokenizer.encode(text)
    if length is None or len(whole) <= length:
        return [whole]
    # Paragraphs, with the empty lines after them.
    paragraphs = re.findall(r".+?(?:\n\s*\n|\Z)", text, re.DOTALL)
    pieces = [x for part in paragraphs for x in _cut(part, tokenizer, length)]
    total = sum(map(len, pieces))
    wanted = total / -(-total // length)
    chunks: list[list[int]] = [[]]
    done = 0
    for piece in pieces:
        # The next chunk begins where a piece's middle is past the chunk's share.
        past = done + len(piece) / 2 > wanted * len(chunks)
        if chunks[-1] and (past or len(chunks[-1]) + len(piece) > length):
            chunks.append([])
        chunks[-1] += piece
        done += len(piece)
    return [*chunks]


def _cut(text: str, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Returns the tokens of a paragraph, of its lines, or of parts of these."""
    ids = tokenizer.encode(text)
    if len(ids) <= length:
        return [ids]
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        return [part for line in lines for part in _cut(line, tokenizer, length)]
    return [list(part) for part in cut_evenly(ids, length)]


def cut_evenly(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cuts tokens into parts of similar length, at most `length` tokens each."""
    count = -(-len(ids) // length)
    bounds = [round(len(ids) * number / count) for number in range(count + 1)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


PARTS = 4
"""Minimum number of parts to retrieve."""
SHORTEST_PART = 8
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""The parameters `k1` and `b` of BM25."""


class TextRetriever:
    """Retrieves the parts of a text that share the most words with a question.

    They have up to `count` tokens in total. Words are tokens, and the score is BM25
    (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", equation
    3.15).
    """

    def __init__(self, text: str, tokenizer: Tokenizer, count: int):
        length = min(max(count // PARTS, SHORTEST_PART), count)
        self._parts = [tuple(part) for part in cut_text(text, tokenizer, length)]
        self._counts = [collections.Counter(part) for part in self._parts]
        self._parts_with = collections.Counter(x for part in self._counts for x in part)
        self._mean = sum(map(len, self._parts)) / len(self._parts)
        self._count = count

    def __call__(self, question: Sequence[int]) -> list[int]:
        """Returns the best parts for a question's tokens, in text order."""
        asked = set(question)
        scores = [self._score(number, asked) for number in range(len(self._parts))]
        chosen, room = [], self._count
        for number in sorted(range(len(scores)), key=lambda n: -scores[n]):
            if len(self._parts[number]) <= room:
                chosen.append(number)
                room -= len(self._parts[number])
        return [token for number in sorted(chosen) for token in self._parts[number]]

    def _score(self, number: int, asked: set[int]) -> float:
        counts, length = self._counts[number], len(self._parts[number]) / self._mean
        penalty = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * length)
        shared = sorted(asked & counts.keys())
        weights = [counts[token] / (counts[token] + penalty) for token in shared]
        pairs = zip(map(self._rarity, shared), weights, strict=True)
        return math.fsum(rarity * weight for rarity, weight in pairs)

    def _rarity(self, token: int) -> float:
        parts, having = len(self._parts), self._parts_with[token]
        return math.log(1 + (parts - having + 0.5) / (having + 0.5))
