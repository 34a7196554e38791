"""Regular expressions, JSON schemas and grammars that new text must match."""

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError
from prompt_tuning.core.limited_process import run_limited
from prompt_tuning.core.typed_json import parse_json

MAXIMUM_REGEX = 10_000
"""Maximum number of characters of a regular expression."""
MAXIMUM_SCHEMA = 2**17
"""Maximum number of characters of a JSON schema."""
MAXIMUM_GRAMMAR = 2**17
"""Maximum number of characters of a grammar."""
COMPILE_SECONDS = 1
"""CPU time limit for compiling a constraint."""
MAXIMUM_STATES = 30_000
"""Maximum number of automaton states per row, of up to 2 kB each."""
WHITESPACE = r" ?|\n[ \t]{0,64}"
"""Space that JSON may have between its parts. With more, a row might never end."""
INSTALL = "pip install 'prompt-tuning[guided]'"


class TextConstraint(NamedTuple):
    """A language that a row's new text must belong to.

    Attributes:
      name: the setting that it comes from, for messages.
      rules: rules in llguidance's grammar language; the rule `body` is the text.
    """

    name: str
    rules: str

    def grammar(self, drops_space: bool) -> str:
        """Returns the grammar of the text.

        Args:
          drops_space: whether a leading space is dropped. The text after it must then
            match, and a text that itself starts with a space does not.
        """
        start = "start: body"
        if drops_space and self.name == "regex":
            start = "start: OPENED\nOPENED: / ?/ (BODY & /([^ ](?s:.)*)?/)"
        elif drops_space:
            start = 'start: " "? body'
        # The model chooses the tokens of text that is certain, too.
        return f'%llguidance {{"no_forcing": true}}\n{start}\n{self.rules}'


def guidance_library() -> Any:
    """Returns the module llguidance.

    Raises:
      InputError: if it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "regex, json_schema and grammar need llguidance: install the extra by "
            f"{INSTALL}, or leave them out"
        ) from error
    return llguidance


def parser_limits() -> Any:
    """Returns the parser limits for matching texts with a constraint."""
    return guidance_library().LLParserLimits(
        max_lexer_states=MAXIMUM_STATES,
        # The time must not depend on the vocabulary, which the check does not have.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def schema_text(schema: Mapping[str, Any] | str) -> str:
    """Returns a JSON schema as text.

    Raises:
      InputError: if it is not JSON.
    """
    if not isinstance(schema, str):
        try:
            schema = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"json_schema is not JSON: {error}") from None
    _check_size("json_schema", schema, MAXIMUM_SCHEMA)
    value = parse_json(schema, "json_schema")
    if not isinstance(value, dict | bool):
        raise InputError("json_schema is neither a JSON object nor true")
    return schema


def find_constraint(
    regex: str | None, schema: str | None, grammar: str | None
) -> TextConstraint | None:
    """Returns the constraint of a row's settings; None if it has none.

    Raises:
      InputError: if there is more than one, or it is invalid, too long, or takes too
        long to compile.
    """
    values = {"regex": regex, "json_schema": schema, "grammar": grammar}
    names = [name for name in values if values[name] is not None]
    if len(names) > 1:
        raise InputError(f"{names[0]} and {names[1]} are both set: leave out one")
    if regex is not None:
        _check_size("regex", regex, MAXIMUM_REGEX)
        return _regex_constraint(regex)
    if grammar is not None:
        _check_size("grammar", grammar, MAXIMUM_GRAMMAR)
        return _grammar_constraint(grammar)
    return None if schema is None else _schema_constraint(schema)


def _check_size(name: str, text: str, maximum: int) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{name} has half a surrogate pair, which no text may have")
    if len(text) > maximum:
        raise InputError(
            f"{name} has {len(text):,} characters, expected at most {maximum:,}"
        )


@functools.lru_cache(maxsize=32)
def _regex_constraint(regex: str) -> TextConstraint:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise InputError("regex ends with a single backslash: write two of them")
    # The second argument: \d means 0 to 9, not the digits of all scripts.
    escaped = guidance_library().regex_to_lark(regex, "d")
    constraint = TextConstraint("regex", f"body: BODY\nBODY: /{escaped}/")
    _check_compiles(constraint)
    return constraint


@functools.lru_cache(maxsize=32)
def _schema_constraint(schema: str) -> TextConstraint:
    value = parse_json(schema, "json_schema")
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    if isinstance(value, dict):
        value = options | value
    elif value:
        value = options
    constraint = TextConstraint("json_schema", f"body: %json {json.dumps(value)}")
    _check_compiles(constraint)
    return constraint


@functools.lru_cache(maxsize=32)
def _grammar_constraint(grammar: str) -> TextConstraint:
    # A grammar in it has rules, and a rule `start`, of its own.
    constraint = TextConstraint("grammar", f"body: %lark {{\n{grammar}\n}}")
    _check_compiles(constraint)
    return constraint


def _check_compiles(constraint: TextConstraint) -> None:
    """Compiles a constraint in another process with time and memory limits.

    A few characters can describe an automaton that takes minutes to build.
    """
    guidance_library()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / constraint.name
        source.write_text(constraint.grammar(drops_space=False))
        run_limited(
            compile_grammar,
            source,
            Path(folder),
            seconds=COMPILE_SECONDS,
            problem=f"the {constraint.name} is too complex",
        )


def compile_grammar(source: Path, folder: Path) -> None:
    """Compiles the grammar in a file, for a vocabulary of single bytes.

    Args:
      source: the file, named after the setting.
      folder: unused.
    """
    del folder
    os.nice(10)  # rows that generate come first
    library = guidance_library()
    matcher = library.LLMatcher(
        library.LLTokenizer("byte"),
        source.read_text(),
        log_level=0,
        limits=parser_limits(),
    )
    if matcher.is_error():
        raise InputError(f"{source.name} cannot be used: {problem_of(matcher)}")


def problem_of(matcher: Any) -> str:
    """Returns a matcher's error on one line, without the grammar; "" for none."""
    first, *others = [line.strip() for line in matcher.get_error().split("\n")]
    place, _, problem = first.partition(": ")
    reasons = [line[7:] for line in others if line.startswith("error: ")]
    # The message of a grammar begins with a place in it.
    return [*reasons, problem if place.startswith("at ") else first][0][:MAXIMUM_SHOWN]
