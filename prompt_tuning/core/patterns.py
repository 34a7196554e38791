r"""Regular expressions from configs and adapters, matched by RE2 in linear time.

Python's `re` takes exponential time for some expressions, e.g. `(a+)+b`. RE2
(https://github.com/google/re2/wiki/Syntax) takes time proportional to the length of the
name. It lacks backreferences, lookbehinds, atomic groups, possessive repetitions and
`\Z`, and its `\w`, `\d` and `\b` know only ASCII.

RE2 also lacks lookaheads, which ms-swift and LLaMA-Factory write in the
`target_modules` of adapters, e.g. `^(model)(?!.*(lm_head|embed)).*`. We support them if
they stand outside groups in one place: RE2 matches the expressions before, in and after
them at each position of a name.
"""

import functools
import itertools
import re
from typing import Any

import re2

from prompt_tuning.core.errors import InputError, shown

MAXIMUM_PATTERN = 2000
"""Maximum length of a regular expression."""

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[=!]|[()|]", re.DOTALL)
_FLAGS = re.compile(r"\(\?[ims]+\)|")

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


class Pattern:
    """A regular expression that matches whole names.

    Args:
      pattern: expression.

    Raises:
      re2.error: if RE2 cannot match it.
    """

    def __init__(self, pattern: str):
        looks = _find_lookaheads(pattern)
        start, stop = (looks[0][0], looks[-1][1]) if looks else (0, 0)
        flags = _FLAGS.findall(pattern[:start])[0]
        self._before = _compile(pattern[:start])
        self._after = _compile(flags + pattern[stop:])
        self._looks = [
            (_compile(flags + pattern[start + 3 : stop - 1]), pattern[start + 2] == "=")
            for start, stop in looks
        ]

    def matches(self, name: str) -> bool:
        """Whether the expression matches the whole name."""
        return self._match(name) is not None

    def fill(self, name: str, template: str) -> str:
        r"""Replaces `\1` or `\g<1>` in a template by the text of the first group, etc.

        Raises:
          IndexError: if there is no such group.
          ValueError: for other escapes, and for groups in an expression with
            lookaheads.
        """
        if self._looks and "\\" in template:
            raise ValueError("groups beside lookaheads cannot be used")
        return self._match(name).expand(template.encode()).decode()

    def _match(self, name: str) -> Any:
        text = name.encode(errors="replace")  # half a surrogate pair
        if not self._looks:
            return self._after.fullmatch(text)
        for at in range(len(text) + 1):
            if (
                self._before.fullmatch(text, 0, at)
                and all(bool(x.match(text, at)) == wanted for x, wanted in self._looks)
                and (match := self._after.fullmatch(text, at))
            ):
                return match
        return None


@functools.cache
def compile_pattern(pattern: str, name: str, within: str = "{}") -> Pattern:
    """Compiles a regular expression for names of modules or paths of parameters.

    Args:
      pattern: untrusted expression.
      name: name of the setting, for messages.
      within: expression to insert it into.

    Raises:
      InputError: if RE2 cannot match the expression, or it is too long.
    """
    if len(pattern) > MAXIMUM_PATTERN:
        raise InputError(
            f"{name} has a pattern of {len(pattern):,} characters, expected at most "
            f"{MAXIMUM_PATTERN:,}"
        )
    try:
        return Pattern(within.replace("{}", pattern))
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0]
        reason = reason.decode() if isinstance(reason, bytes) else str(error)
        raise InputError(
            f"{name} has {shown(pattern)}, which is not a regular expression of RE2: "
            f"{reason}; lookaheads may stand in one place outside groups, and "
            "lookbehinds, backreferences, atomic groups and possessive repetitions "
            "nowhere: write several patterns, or list the names"
        ) from error


def _compile(pattern: str) -> Any:
    return re2.compile(pattern.encode(), _OPTIONS)


def _find_lookaheads(pattern: str) -> list[tuple[int, int]]:
    """Finds lookaheads outside groups; RE2 refuses all others.

    Returns:
      start and end of each, if they follow one another and the expression has no
      alternatives outside groups; otherwise nothing.
    """
    looks: list[tuple[int, int]] = []
    depth, start = 0, None
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text == "|" and depth == 0:
            return []
        if text.startswith("("):
            if depth == 0:
                start = token.start() if text != "(" else None
            depth += 1
        elif text == ")":
            depth -= 1
            if depth == 0 and start is not None:
                looks.append((start, token.end()))
    joined = all(end == start for (_, end), (start, _) in itertools.pairwise(looks))
    return looks if joined else []
