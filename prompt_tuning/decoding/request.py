"""Requests of the decoding engine, and their results.

The random key of a token combines the row's seed and content with the numbers of its
sample and token. Tokens therefore do not depend on other rows or their order. If two
rows agree in all of these, the second one continues the sample numbers of the first.
"""

import dataclasses
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, UInt32

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveInteger
from prompt_tuning.decoding.sampling_settings import Sampling


def content_number(
    ids: Sequence[int], embeddings: Float[np.ndarray, "T D"] | None = None
) -> int:
    """Hashes a row's content to a number below 2^32."""
    content = np.asarray(ids, np.int64).tobytes()
    if embeddings is not None:
        content += np.ascontiguousarray(embeddings, np.float32).tobytes()
    return zlib.crc32(content)


def repetitions(rows: Sequence[int]) -> UInt32[np.ndarray, "R"]:
    """Counts the equal rows before each row.

    Args:
      rows: hash of each row; an `array` takes 8 bytes per row.

    >>> repetitions([7, 8, 7, 7]).tolist()
    [0, 0, 1, 2]
    """
    hashes = np.asarray(rows, np.int64)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
    places = np.arange(len(ordered))
    numbers = np.empty(len(ordered), np.uint32)
    numbers[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return numbers


EndReason = Literal["stop", "length", "cancelled", "failed"]
"""Why a row ended.

"stop": an end token, a stop text, or a text that its constraint does not let grow.
"length": the limit of new tokens. "cancelled": `cancel`. "failed": the constraint
allows no token.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A text to continue.

    Attributes:
      text: the text, encoded as in training, or None.
      ids: token ids to continue as they are, or None.
      embeddings: vectors to read instead of tokens, e.g. those of a soft prompt, or
        None. Exactly one of text, ids and embeddings is given.
      adapter: name of a loaded adapter; None for the frozen model alone.
      prompt_id: number of the prompt if the adapter has more than one, else None.
      sampling: how new tokens are chosen.
      shared_text: text before `text` that many requests share. Its keys and values are
        computed once per adapter, stored once, and read once for all rows.
      shared_ids: its ids, instead of the text.
      first_sample: number of the first sample among those of all equal requests, so
        that equal requests sample differently; see `separate_equal`.
      client: who submitted it, for queues in which clients take turns, or None.
      written: texts of special tokens that appear in the new text.
      fits: whether to reduce the number of new tokens to the available room; otherwise
        such a request is refused.
      scored_from: index of the first given token that `Sampling.given_logprobs` applies
        to. The first token of a row follows nothing and has no score.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    embeddings: Float[np.ndarray, "T D"] | None = None
    adapter: str | None = None
    prompt_id: int | None = None
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    shared_text: str | None = None
    shared_ids: Sequence[int] | None = None
    first_sample: int = 0
    client: Hashable = None
    written: Mapping[int, str] = dataclasses.field(default_factory=dict)
    fits: bool = False
    scored_from: PositiveInteger = 1

    def __post_init__(self):
        check_value("scored_from", self.scored_from, PositiveInteger)
        present = [x is not None for x in (self.text, self.ids, self.embeddings)]
        if sum(present) != 1:
            raise InputError(
                "a request has either text, ids or embeddings: give one of them"
            )
        if self.shared_text is not None and self.shared_ids is not None:
            raise InputError("a request has shared_text or shared_ids, not both")

    @property
    def shares(self) -> bool:
        """Whether a shared text precedes the request's own text."""
        return self.shared_text is not None or self.shared_ids is not None

    @property
    def row(self) -> tuple[Hashable, ...]:
        """Values that equal requests have in common."""
        ids = None if self.ids is None else tuple(self.ids)
        vectors = None if self.embeddings is None else self.embeddings.tobytes()
        shared = None if self.shared_ids is None else tuple(self.shared_ids)
        text = (self.text, self.shared_text, ids, vectors, shared)
        return (*text, self.adapter, self.prompt_id, self.sampling.seed)


def separate_equal(requests: Sequence[Request]) -> list[Request]:
    """Makes equal requests sample differently; keeps the order."""
    numbers = repetitions([hash(request.row) for request in requests])
    return [
        dataclasses.replace(request, first_sample=int(number) * request.sampling.n)
        for request, number in zip(requests, numbers, strict=True)
    ]


class TokenLogprob(NamedTuple):
    """Log-probabilities at one token, before temperature and penalties.

    Attributes:
      token: id of the chosen or given token.
      logprob: its natural log-probability.
      top: ids and log-probabilities of the most probable tokens, best first.
      offset: position of the token's first character in the row's text; tokens that are
        parts of one character share it.
      rank: number of tokens that are at least as probable as a given one.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int = 0
    rank: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Completion:
    """The continuation of one row; prints as its text.

    Attributes:
      text: its text, without what ended it.
      ids: its tokens, without the end token but with the tokens of a stop text.
      logprobs: log-probabilities of `ids`; None if not requested.
      reason: why it ended.
      sample: number of the sample within its request.
      given_tokens: number of tokens in the request.
      score: score that beams are ranked by; None otherwise.
      problem: why a row with the reason "failed" cannot be continued.
      given_logprobs: log-probabilities of the given tokens from `Request.scored_from`
        on; None if not requested.
      end_logprob: log-probabilities of the token that ended the row, which `ids` leaves
        out; None if there is none or they were not requested.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    reason: EndReason
    sample: int = 0
    given_tokens: int
    score: float | None = None
    problem: str = ""
    given_logprobs: tuple[TokenLogprob, ...] | None = None
    end_logprob: TokenLogprob | None = None

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)


@dataclasses.dataclass(frozen=True)
class RequestHandle:
    """A submitted request."""

    number: int
    request: Request
    new_tokens: int
    completions: list[Completion] = dataclasses.field(
        default_factory=list, compare=False
    )

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return len(self.completions) == self.request.sampling.n


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """New tokens of a row, as a stream delivers them.

    Joined, the texts of a sample's pieces are the text of its `Completion`. A piece may
    have tokens but no text, while a character or a possible stop text is incomplete.
    `text` can no longer change; `completion` is the whole result, in the last piece of
    a sample.
    """

    handle: RequestHandle
    sample: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    completion: Completion | None = None
