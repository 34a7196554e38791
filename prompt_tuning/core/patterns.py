"""Regular expressions from configs and adapters, limited in what matching them takes.

Python's `re` tries every way to divide a name among the repetitions of an expression,
and a repeated group makes their number exponential in the length of the name.
"""

import functools
import re

from prompt_tuning.core.errors import InputError, shown

MAXIMUM_PATTERN = 2000
"""Maximum length of a regular expression."""
MAXIMUM_PARTS = 4
"""Maximum number of repetitions, and of groups, of a regular expression."""

_ONE_CHARACTER = re.compile(r"\\.|\[[^\]]+\]", re.DOTALL)
_REPETITION = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@functools.cache
def compile_pattern(pattern: str, name: str, within: str = "{}") -> re.Pattern[str]:
    """Compiles a regular expression for names of modules or paths of parameters.

    Args:
      pattern: expression from settings that anybody may have written.
      name: name of the setting, for messages.
      within: expression to insert it into.

    Raises:
      InputError: if it is not an expression, or too complex.
    """
    if len(pattern) > MAXIMUM_PATTERN:
        raise InputError(
            f"{name} has a pattern of {len(pattern):,} characters, expected at most "
            f"{MAXIMUM_PATTERN:,}"
        )
    plain = _ONE_CHARACTER.sub("x", pattern)
    repetitions, groups = len(_REPETITION.findall(plain)), plain.count("(")
    if _REPEATED_GROUP.search(plain) or max(repetitions, groups) > MAXIMUM_PARTS:
        raise InputError(
            f"{name} has {shown(pattern)}, with {repetitions} repetitions and {groups} "
            f"groups, expected at most {MAXIMUM_PARTS} of each and no repeated group, "
            "since matching it could take forever; use several patterns, or list the "
            "names"
        )
    try:
        return re.compile(within.replace("{}", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(
            f"{name} has {shown(pattern)}, which is not a regular expression: {error}"
        ) from error
