"""Regular expressions from configs and adapters, limited in what matching them takes.

Python's `re` tries every way to divide a name among the repetitions of an expression,
and a repeated group makes their number exponential in the length of the name. They are
therefore counted for each name before it is matched.
"""

import functools
import re
from collections.abc import Sequence
from re import _constants as kinds  # pyright: ignore # the tree of an expression
from re import _parser as parser  # pyright: ignore
from typing import Any

from prompt_tuning.core.errors import InputError, shown

MAXIMUM_PATTERN = 2000
"""Maximum length of a regular expression."""
MAXIMUM_STEPS = 1_000_000
"""Maximum number of steps of matching a regular expression with a name."""
SIMPLE_PARTS = 4
"""Number of repetitions, and of groups, up to which steps are not counted."""

_ONE_CHARACTER = re.compile(r"\\.|\[[^\]]+\]", re.DOTALL)
_REPETITION = re.compile(r"(?<!\()[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
_LOOKS = (kinds.ASSERT, kinds.ASSERT_NOT)

Ways = Sequence[int]
"""Number of ways to reach each position of a name, which includes its end."""


class LimitedPattern:
    """A regular expression whose steps are limited.

    Args:
      pattern: expression.
      name: name of the setting, for messages.
      within: expression to insert it into.
    """

    def __init__(self, pattern: str, name: str, within: str):
        self._pattern, self._name = pattern, name
        whole = within.replace("{}", pattern)
        self._compiled = re.compile(whole)
        self._tree = None if _is_simple(pattern) else parser.parse(whole)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """Matches a whole name.

        Raises:
          InputError: if it may take too many steps.
        """
        try:
            if self._tree is not None:
                starts = [1] + [0] * len(text)
                _StepCounter(text).through(self._tree, starts)
        except (_TooManyStepsError, RecursionError):
            raise InputError(
                f"{self._name} has {shown(self._pattern)}, which takes more than "
                f"{MAXIMUM_STEPS:,} steps for {shown(text)}: write it with fewer "
                "repetitions, as several patterns, or list the names"
            ) from None
        return self._compiled.fullmatch(text)


@functools.cache
def compile_pattern(pattern: str, name: str, within: str = "{}") -> LimitedPattern:
    """Compiles a regular expression for names of modules or paths of parameters.

    Args:
      pattern: expression from settings that anybody may have written.
      name: name of the setting, for messages.
      within: expression to insert it into.

    Raises:
      InputError: if it is not an expression, or too long.
    """
    if len(pattern) > MAXIMUM_PATTERN:
        raise InputError(
            f"{name} has a pattern of {len(pattern):,} characters, expected at most "
            f"{MAXIMUM_PATTERN:,}"
        )
    try:
        return LimitedPattern(pattern, name, within)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name} has {shown(pattern)}, which is not a regular expression: {error}"
        ) from error


def _is_simple(pattern: str) -> bool:
    plain = _ONE_CHARACTER.sub("x", pattern)
    repetitions, groups = len(_REPETITION.findall(plain)), plain.count("(")
    return (
        not _REPEATED_GROUP.search(plain) and max(repetitions, groups) <= SIMPLE_PARTS
    )


class _TooManyStepsError(Exception):
    pass


class _StepCounter:
    """Counts the steps in which an expression fails to match, at most.

    A step is a way to match a beginning of the expression with a beginning of the text;
    backtracking tries each of them. Classes of characters count as matching everything.
    """

    def __init__(self, text: str):
        # None stands for a character that may equal several ones if case is ignored.
        self._text = [x.lower() if x.isascii() else None for x in text]
        self._steps = self._work = 0

    def through(self, tree: Any, starts: Ways) -> Ways:
        """Returns the ways to match a sequence, given those to reach its beginning."""
        for kind, argument in tree:
            self._steps += sum(starts)
            self._work += len(starts)  # of this count
            if max(self._steps, self._work) > MAXIMUM_STEPS:
                raise _TooManyStepsError
            starts = self._after(kind, argument, starts)
        return starts

    def _after(self, kind: Any, argument: Any, starts: Ways) -> Ways:
        if kind == kinds.AT:
            return starts
        if kind in _REPEATS:
            least, most, tree = argument
            return self._repeated(least, most, tree, starts)
        if kind == kinds.BRANCH:
            return _sum([self.through(branch, starts) for branch in argument[1]])
        if kind in (kinds.SUBPATTERN, kinds.ATOMIC_GROUP):
            tree = argument[-1] if kind == kinds.SUBPATTERN else argument
            return self.through(tree, starts)
        if kind in _LOOKS:
            direction, tree = argument
            width = 0 if direction > 0 else tree.getwidth()[0]
            self.through(tree, [*starts[width:], *([0] * min(width, len(starts)))])
            return starts
        if kind in (kinds.GROUPREF, kinds.GROUPREF_EXISTS):
            raise _TooManyStepsError  # depends on what was matched
        if kind != kinds.LITERAL:
            return [0, *starts[:-1]]
        expected = chr(argument).lower()
        pairs = zip(self._text, starts, strict=False)
        return [0, *(n if x is None or x == expected else 0 for x, n in pairs)]

    def _repeated(self, least: int, most: int, tree: Any, starts: Ways) -> Ways:
        ends = starts if not least else [0] * len(starts)
        for count in range(1, min(most, least + len(starts)) + 1):
            starts = self.through(tree, starts)
            if not any(starts):
                break
            if count >= least:
                ends = _sum([ends, starts])
        return ends


def _sum(ways: Sequence[Ways]) -> Ways:
    return [sum(column) for column in zip(*ways, strict=True)]
