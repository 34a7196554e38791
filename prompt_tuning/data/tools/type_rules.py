"""Rules for the types of a row's tokens: prompt, completion, separator or padding.

A row has one or more examples, each ended by an *end* token (type 3), and padding (type
2) before, after or between them. The first part of an example is its prompt (type 0),
and the rest its completion (type 1).
"""

import abc
import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32, Integer

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR

Ids = Integer[np.ndarray, "c n"]
Mask = Bool[np.ndarray, "c n"]
Which = Literal["first", "last"]


class TypeRule(abc.ABC):
    """Computes the token types of rows.

    Attributes:
      source: name of the file or the rule that gives the types, for messages.
    """

    source: str = "the rule"

    @property
    def rows(self) -> int | None:
        """Number of rows that it has types for; None for any number."""
        return None

    @abc.abstractmethod
    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """Returns the types of rows `start` to `start + c`.

        The message about a row that the rule does not apply to gives its number.
        """


@dataclasses.dataclass(frozen=True)
class EndTokens:
    """The tokens that end an example and that fill a row.

    Padding stands at the start or at the end of a row, or after an end token; elsewhere
    its id is a token of the text. If both are the same token, the first of those at the
    end of a row ends the last example, and a row may begin with at most one.

    An end token before the first example of a row ends nothing: it is BOS, which GPT-2
    shares with EOS, and belongs to the example that follows.

    Attributes:
      end_id: id of the token that ends an example, or None.
      padding_id: id of the token that fills a row; None if rows are full.
    """

    end_id: int | None = None
    padding_id: int | None = None

    def ends(self, input_ids: Ids) -> Mask:
        """Returns a mask of the tokens that end an example."""
        if self.end_id is None:
            return np.zeros(input_ids.shape, bool)
        padding = self.padding(input_ids)
        ends = (input_ids == self.end_id) & ~padding
        # The first token of each row that is not padding.
        ends &= np.arange(input_ids.shape[1]) > padding.argmin(axis=1)[:, None]
        return ends

    def padding(self, input_ids: Ids) -> Mask:
        """Returns a mask of the tokens that fill the rows."""
        if self.padding_id is None:
            return np.zeros(input_ids.shape, bool)
        is_filler = input_ids == self.padding_id
        count = input_ids.shape[1]
        # The last token before each position that is no filler, and the next one.
        before = _last_position(~is_filler)
        trailing = is_filler & (_next_position(~is_filler) == count)
        if self.padding_id == self.end_id:
            # The first filler at the end of a row ends its last example.
            return trailing & ((np.arange(count) > before + 1) | (before < 0))
        ends = input_ids == (-1 if self.end_id is None else self.end_id)
        after_end = np.take_along_axis(ends, np.maximum(before, 0), axis=1)
        return is_filler & (trailing | (before < 0) | after_end)

    def check(self, input_ids: Ids, start: int) -> None:
        """Refuses rows that begin with two or more tokens of BOS or padding."""
        if self.padding_id is None or self.padding_id != self.end_id:
            return
        counts = (input_ids == self.padding_id).argmin(axis=1)
        if (counts > 1).any():
            row = int(np.argmax(counts > 1))
            raise InputError(
                f"row {start + row} begins with {counts[row]} tokens {self.end_id}, "
                "which are both --end and --padding, so it cannot be told if the last "
                "of them is padding or begins the text: fill rows with another token, "
                "or give the types by --array"
            )

    def types(self, input_ids: Ids, prompt: Mask) -> Int32[np.ndarray, "c n"]:
        """Returns the types of all tokens, given a mask of the prompts."""
        types = np.where(prompt, PROMPT, COMPLETION).astype(np.int32)
        types[self.ends(input_ids)] = SEPARATOR
        types[self.padding(input_ids)] = PADDING
        return types


@dataclasses.dataclass(frozen=True)
class AllCompletion(TypeRule):
    """Makes every token except padding a completion token; see `TypeRule`."""

    ends: EndTokens = EndTokens()

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        self.ends.check(input_ids, start)
        return self.ends.types(input_ids, np.zeros(input_ids.shape, bool))


@dataclasses.dataclass(frozen=True)
class UntilSeparator(TypeRule):
    """Ends each prompt with a separator, which belongs to it; see `TypeRule`.

    Attributes:
      separators: ids that separate a prompt from its completion.
      which: whether the first or the last separator of an example ends its prompt.
      ends: tokens that end examples and fill rows.
      learn_others: whether an example without a separator is learned, or rejected.
    """

    separators: tuple[int, ...]
    which: Which
    ends: EndTokens = EndTokens()
    learn_others: bool = False

    def __post_init__(self):
        if not self.separators:
            raise InputError("there is no separator: name at least one token")
        for role in ("end", "padding"):
            if getattr(self.ends, f"{role}_id") in self.separators:
                raise InputError(
                    f"token {getattr(self.ends, f'{role}_id')} is the {role} token and "
                    "a separator too, but a separator divides a prompt from its "
                    "completion; name another"
                )

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        self.ends.check(input_ids, start)
        separator = np.isin(input_ids, self.separators)
        first, last = _example_bounds(self.ends.ends(input_ids))
        following = _next_position(separator)
        # The last separator before each token, excluding the token itself.
        before = np.roll(_last_position(separator), 1, axis=1)
        before[:, :1] = -1
        follows = following <= last
        precedes = before >= first
        if not self.learn_others:
            real = ~self.ends.padding(input_ids)
            self._check_separators(real & ~follows & ~precedes, start)
        prompt = follows if self.which == "last" else follows & ~precedes
        return self.ends.types(input_ids, prompt)

    def _check_separators(self, without: Mask, start: int) -> None:
        if without.any():
            row, token = np.argwhere(without)[0]
            raise InputError(
                f"row {start + int(row)}: the example at token {token} has no "
                f"separator ({', '.join(map(str, self.separators))}) to end its "
                "prompt; --learn_others learns all of such an example"
            )


def _example_bounds(
    ends: Mask,
) -> tuple[Integer[np.ndarray, "c n"], Integer[np.ndarray, "c n"]]:
    """Returns the bounds of the example that a token is in, by token."""
    first = np.roll(_last_position(ends), 1, axis=1) + 1
    first[:, :1] = 0
    return first, np.minimum(_next_position(ends), ends.shape[1] - 1)


def _next_position(mask: Mask) -> Integer[np.ndarray, "c n"]:
    """Returns the next position in the mask at or after each token; `n` if none."""
    count = mask.shape[1]
    positions = np.where(mask, np.arange(count), count)
    return np.minimum.accumulate(positions[:, ::-1], axis=1)[:, ::-1]


def _last_position(mask: Mask) -> Integer[np.ndarray, "c n"]:
    """Returns the last position in the mask at or before each token; -1 if none."""
    positions = np.where(mask, np.arange(mask.shape[1]), -1)
    return np.maximum.accumulate(positions, axis=1)


@dataclasses.dataclass(frozen=True)
class PromptLengths(TypeRule):
    """Makes the first tokens of a row its prompt; see `TypeRule`.

    Attributes:
      lengths: number of prompt tokens of all rows, or `[rows]`, after any padding.
      ends: tokens that end examples and fill rows.
      source: file of the lengths, for messages.
    """

    lengths: int | Integer[np.ndarray, "rows"]
    ends: EndTokens = EndTokens()
    source: str = "the rule"

    @property
    def rows(self) -> int | None:
        """See `TypeRule`."""
        return None if isinstance(self.lengths, int) else len(self.lengths)

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        self.ends.check(input_ids, start)
        count, length = input_ids.shape
        lengths = self.lengths
        if isinstance(lengths, np.ndarray):
            lengths = lengths[start : start + count]
        lengths = np.broadcast_to(np.asarray(lengths, np.int64), count).copy()
        outside = (lengths < 0) | (lengths > length)
        if outside.any():
            row = int(np.argmax(outside))
            raise InputError(
                f"row {start + row}: its prompt length is {lengths[row]} tokens by "
                f"{self.source}, expected 0 to {length}, the row's length"
            )
        lengths += self.ends.padding(input_ids).argmin(axis=1)
        return self.ends.types(input_ids, np.arange(length) < lengths[:, None])


@dataclasses.dataclass(frozen=True)
class GivenTypes(TypeRule):
    """Uses types from an array `[rows, n]` of the file `source`; see `TypeRule`."""

    types: Integer[np.ndarray, "rows n"]
    source: str = "the array"

    @property
    def rows(self) -> int | None:
        """See `TypeRule`."""
        return len(self.types)

    def __call__(self, input_ids: Ids, start: int) -> Int32[np.ndarray, "c n"]:
        """See `TypeRule`."""
        types = self.types[start : start + len(input_ids)]
        if types.shape != input_ids.shape:
            raise InputError(
                f"row {start}: {self.source} has types for {types.shape[1]} tokens, "
                f"expected {input_ids.shape[1]}, as many as the row has"
            )
        outside = (types < PROMPT) | (types > SEPARATOR)
        if outside.any():
            row, token = np.argwhere(outside)[0]
            raise InputError(
                f"row {start + int(row)}, token {token}: {self.source} has type "
                f"{types[row, token]}, expected 0 (prompt), 1 (completion), 2 "
                "(padding) or 3 (separator)"
            )
        return types.astype(np.int32)
