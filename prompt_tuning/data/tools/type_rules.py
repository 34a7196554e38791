"""Rules that say the type of each token of a row: which are given, which are learned.

A row is one article or several, each closed by an *end* token (type 3), and what is
left of it is padding (type 2). Of each article a first part is given (type 0), and the
rest is learned (type 1).
"""

import dataclasses
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR

Ids = Integer[np.ndarray, "c n"]
Chosen = Bool[np.ndarray, "c n"]
Which = Literal["first", "last"]


@runtime_checkable
class TypeRule(Protocol):
    """Says the types of rows."""

    @property
    def rows(self) -> int | None:
        """How many rows it knows the types of; None for any number."""
        ...

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """The types of rows `start` to `start + c`.

        Raises:
          InputError: at the first row to which the rule does not apply.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Ends:
    """What closes an article, and what fills a row.

    Where both are one token, the first of those that a row ends with closes it. One
    that a row begins with closes nothing: it is BOS, which in GPT-2 is EOS too, and of
    the article that follows.

    Attributes:
      end_id: the token that closes an article; None if nothing does.
      padding_id: the token that fills a row; None if rows are full.
    """

    end_id: int | None = None
    padding_id: int | None = None

    def ends(self, input_ids: Ids) -> Chosen:
        """The tokens that close an article."""
        if self.end_id is None:
            return np.zeros(input_ids.shape, bool)
        ends = (input_ids == self.end_id) & ~self.padding(input_ids)
        ends[:, :1] = False
        return ends

    def padding(self, input_ids: Ids) -> Chosen:
        """The tokens that fill the rows."""
        places = np.arange(input_ids.shape[1])
        if self.padding_id is None:
            return np.zeros(input_ids.shape, bool)
        real = np.where(input_ids != self.padding_id, places + 1, 0).max(axis=1)
        if self.padding_id == self.end_id:
            real += real > 0
        return places >= real[:, None]

    def types(self, input_ids: Ids, prompt: Chosen) -> Int32[np.ndarray, "c n"]:
        """The types of tokens of which some are a prompt."""
        types = np.where(prompt, PROMPT, COMPLETION).astype(np.int32)
        types[self.ends(input_ids)] = SEPARATOR
        types[self.padding(input_ids)] = PADDING
        return types


@dataclasses.dataclass(frozen=True)
class AllCompletion:
    """Every token is learned, padding aside; see `TypeRule`."""

    ends: Ends = Ends()
    rows: int | None = None

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        del start
        return self.ends.types(input_ids, np.zeros(input_ids.shape, bool))


@dataclasses.dataclass(frozen=True)
class UntilSeparator:
    """An article is given up to a separator, which is given too; see `TypeRule`.

    Attributes:
      separators: the ids that part a prompt from its completion.
      which: the first or the last of an article.
      ends: what closes articles and fills rows.
      learn_others: whether an article without a separator is learned; it is refused
        otherwise.
    """

    separators: tuple[int, ...]
    which: Which
    ends: Ends = Ends()
    learn_others: bool = False
    rows: int | None = None

    def __post_init__(self):
        if not self.separators:
            raise InputError("there is no separator: name at least one token")
        for role in ("end", "padding"):
            if getattr(self.ends, f"{role}_id") in self.separators:
                raise InputError(
                    f"token {getattr(self.ends, f'{role}_id')} is the {role} token and "
                    "a separator too: a separator parts a prompt from its completion; "
                    "name another"
                )

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        separator = np.isin(input_ids, self.separators)
        first, last = _articles(self.ends.ends(input_ids))
        following = _next(separator)
        # The last separator before each token, the token itself aside.
        before = np.roll(_last(separator), 1, axis=1)
        before[:, :1] = -1
        follows = following <= last
        precedes = before >= first
        if not self.learn_others:
            real = ~self.ends.padding(input_ids)
            self._refuse(real & ~follows & ~precedes, start)
        prompt = follows if self.which == "last" else follows & ~precedes
        return self.ends.types(input_ids, prompt)

    def _refuse(self, without: Chosen, start: int) -> None:
        if without.any():
            row, token = np.argwhere(without)[0]
            raise InputError(
                f"row {start + int(row)}: the article at token {token} has no "
                f"separator ({', '.join(map(str, self.separators))}), so nothing says "
                "where its prompt ends; --learn_others learns all of such an article"
            )


def _articles(
    ends: Chosen,
) -> tuple[Integer[np.ndarray, "c n"], Integer[np.ndarray, "c n"]]:
    """The first and the last place of the article that each token is in."""
    first = np.roll(_last(ends), 1, axis=1) + 1
    first[:, :1] = 0
    return first, np.minimum(_next(ends), ends.shape[1] - 1)


def _next(chosen: Chosen) -> Integer[np.ndarray, "c n"]:
    """The place of the next chosen token, itself included; `n` where none follows."""
    count = chosen.shape[1]
    places = np.where(chosen, np.arange(count), count)
    return np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]


def _last(chosen: Chosen) -> Integer[np.ndarray, "c n"]:
    """The place of the last chosen token, itself included; -1 where none precedes."""
    places = np.where(chosen, np.arange(chosen.shape[1]), -1)
    return np.maximum.accumulate(places, axis=1)


@dataclasses.dataclass(frozen=True)
class PromptLengths:
    """The first so many tokens of a row are given; see `TypeRule`.

    Attributes:
      lengths: one number for all rows, or one for each, `[rows]`.
      ends: what closes articles and fills rows.
    """

    lengths: int | Integer[np.ndarray, "rows"]
    ends: Ends = Ends()

    @property
    def rows(self) -> int | None:
        """See `TypeRule`."""
        return None if isinstance(self.lengths, int) else len(self.lengths)

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        count, length = input_ids.shape
        own = self.lengths
        if isinstance(own, np.ndarray):
            own = own[start : start + count]
        lengths = np.broadcast_to(np.asarray(own, np.int64), count)
        outside = (lengths < 0) | (lengths > length)
        if outside.any():
            row = int(np.argmax(outside))
            raise InputError(
                f"row {start + row}: its prompt is to have {lengths[row]} tokens, "
                f"expected 0 to {length}, the row's length"
            )
        return self.ends.types(input_ids, np.arange(length) < lengths[:, None])


@dataclasses.dataclass(frozen=True)
class GivenTypes:
    """Types that somebody worked out; see `TypeRule`.

    Attributes:
      types: of each token, `[rows, n]`.
    """

    types: Integer[np.ndarray, "rows n"]

    @property
    def rows(self) -> int | None:
        """See `TypeRule`."""
        return len(self.types)

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        found = self.types[start : start + len(input_ids)]
        if found.shape != input_ids.shape:
            raise InputError(
                f"row {start}: the array has types for {found.shape[1]} tokens, "
                f"expected {input_ids.shape[1]}, as many as the row has"
            )
        outside = (found < PROMPT) | (found > SEPARATOR)
        if outside.any():
            row, token = np.argwhere(outside)[0]
            raise InputError(
                f"row {start + int(row)}, token {token}: the array has type "
                f"{found[row, token]}, expected 0 (prompt), 1 (completion), 2 "
                "(padding) or 3 (separator)"
            )
        return found.astype(np.int32)
