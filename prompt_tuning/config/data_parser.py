"""Parses the text of a config, which may only set values."""

import ast
import io
import itertools
import math
import os
import tokenize
from collections.abc import Iterator
from typing import Any

from gin import config_parser

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

MAXIMUM_VALUE_DEPTH = 50
"""Maximum nesting of lists, tuples and dicts in a value."""


class NamedText(io.StringIO):
    """Text of a file, with the file's name for gin's messages."""

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.name = name


class DataParser(config_parser.ConfigParser):
    """gin's parser, restricted to data; `allow_imports` accepts import statements."""

    def __init__(self, source: Any, delegate: Any, *, allow_imports: bool = False):
        self._allow_imports = allow_imports
        self._depth = 0
        self._file: str | None = getattr(source, "name", None)
        text = source if self._file is None else source.read()
        joined = _with_joined_texts(text, self._file)
        if self._file is not None:
            joined = NamedText(joined, self._file)
        super().__init__(joined, delegate)

    def parse_value(self) -> Any:
        """Parses a value; see `MAXIMUM_VALUE_DEPTH`."""
        token: Any = self.current_token
        line = token.start[0]
        self._depth += 1
        if self._depth > MAXIMUM_VALUE_DEPTH:
            self._refuse(
                f"nests a value more than {MAXIMUM_VALUE_DEPTH} levels deep, expected "
                f"at most {MAXIMUM_VALUE_DEPTH}",
                line,
            )
        value = super().parse_value()
        self._depth -= 1
        self._check_literal(value, line)
        return value

    def parse_statement(self) -> Any:
        """Parses a statement; see `allow_imports`."""
        statement = super().parse_statement()
        if isinstance(statement, config_parser.IncludeStatement):
            self._check_literal(statement.filename, statement.location.line_num)
        is_import = isinstance(statement, config_parser.ImportStatement)
        if is_import and not self._allow_imports:
            self._refuse(
                "is an import statement, which runs code; a config may only set "
                "values. Remove the statement. If you trust the config and what it "
                "imports as you trust a program, give --allow_gin_imports",
                statement.location.line_num,
            )
        return statement

    def _check_literal(self, value: Any, line: int) -> None:
        if type(value) is int and abs(value) > MAXIMUM_INTEGER:
            self._refuse(
                f"contains the integer {shown(value)}, expected one from "
                f"{-MAXIMUM_INTEGER:,} to {MAXIMUM_INTEGER:,}",
                line,
            )
        if type(value) is float and not math.isfinite(value):
            self._refuse(f"contains {value}, expected a finite number", line)
        if type(value) is str and not is_text(value):
            self._refuse(
                "contains a text with a zero byte or half a surrogate pair, expected "
                "characters",
                line,
            )
        if isinstance(value, bytes | complex):
            kind = type(value).__name__
            self._refuse(
                f"contains a value of type {kind}, expected a number, a text, True, "
                "False or None",
                line,
            )

    def _refuse(self, problem: str, line: int) -> None:
        file = "the binding" if self._file is None else self._file
        raise InputError(f"line {line} of {file} {problem}")


def _with_joined_texts(text: str, file: str | None) -> str:
    """Writes adjacent texts as one; gin takes quadratic time to join them.

    Lines keep their numbers. What Python cannot divide into tokens is left to gin.
    """
    starts = list(itertools.accumulate(map(len, io.StringIO(text)), initial=0))
    parts, end = [], 0
    try:
        for run in _runs_of_texts(text):
            (row, column), (last_row, last_column) = run[0].start, run[-1].end
            try:
                literal = repr(ast.literal_eval(" ".join(x.string for x in run)))
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                line = "" if file else run[0].line
                problem = (file, row, column, line)
                raise SyntaxError("not a literal", problem) from None
            parts += [text[end : starts[row - 1] + column], literal]
            parts += ["\\\n" * (last_row - row)]
            end = starts[last_row - 1] + last_column
    except (tokenize.TokenError, IndentationError):
        return text
    return "".join([*parts, text[end:]])


def _runs_of_texts(text: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Yields two or more texts that only space and comments separate."""
    run: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING:
            run.append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT):
            if len(run) > 1:
                yield run
            run = []


def is_text(value: str) -> bool:
    """Tests whether a text can be part of a file name and of a file's content."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
