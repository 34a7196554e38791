"""Parses the text of a config, which may only set values."""

import ast
import math
import os
import tokenize
from typing import Any

from gin import config_parser

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

MAXIMUM_VALUE_DEPTH = 50
"""Maximum nesting of lists, tuples and dicts in a value."""

_LITERALS = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING)


class DataParser(config_parser.ConfigParser):
    """gin's parser, restricted to data; `allow_imports` accepts import statements.

    Errors name the file and the line and do not repeat the line, because an include can
    name any file.
    """

    def __init__(self, source: Any, delegate: Any, *, allow_imports: bool = False):
        self._allow_imports = allow_imports
        self._depth = 0
        self._current_token: Any
        super().__init__(source, delegate)

    def parse_value(self) -> Any:
        """Parses a value; see `MAXIMUM_VALUE_DEPTH`."""
        self._depth += 1
        if self._depth > MAXIMUM_VALUE_DEPTH:
            self._refuse(
                f"nests a value more than {MAXIMUM_VALUE_DEPTH} levels deep, expected "
                f"at most {MAXIMUM_VALUE_DEPTH}"
            )
        value = super().parse_value()
        self._depth -= 1
        return value

    def parse_statement(self) -> Any:
        """Parses a statement; see `allow_imports`."""
        statement = super().parse_statement()
        is_import = isinstance(statement, config_parser.ImportStatement)
        if is_import and not self._allow_imports:
            self._refuse(
                "is an import statement, which runs code; a config may only set "
                "values. Remove the statement. If you trust the config and what it "
                "imports as you trust a program, give --allow_gin_imports",
                statement.location.line_num,
            )
        return statement

    def _maybe_parse_basic_type(self) -> tuple[bool, Any]:
        """Parses a literal; gin's own method takes quadratic time for long texts."""
        tokens = []
        if self._current_token.string == "-":
            tokens.append("-")
            self._advance()
        if self._current_token.type not in _LITERALS:
            return False, None
        continues = True
        location = self._current_location()
        while continues:
            tokens.append(self._current_token.string)
            continues = self._current_token.type == tokenize.STRING
            self._advance()
            continues &= self._current_token.type == tokenize.STRING
        try:
            value = ast.literal_eval("".join(tokens))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            self._raise_syntax_error("not a literal", location)
        self._check_literal(value, location.line_num)
        return True, value

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
        if value is not None and type(value) not in (bool, int, float, str):
            kind = type(value).__name__
            self._refuse(
                f"contains a value of type {kind}, expected a number, a text, True, "
                "False or None",
                line,
            )

    def _refuse(self, problem: str, line: int | None = None) -> None:
        line = self._current_location().line_num if line is None else line
        file = "the binding" if self._filename is None else self._filename
        raise InputError(f"line {line} of {file} {problem}")

    def _current_location(self, ignore_char_num: bool = False) -> Any:
        location = super()._current_location(ignore_char_num)
        return (
            location if self._filename is None else location._replace(line_content="")
        )

    def _raise_syntax_error(self, msg: str, location: Any = None) -> None:
        file, line, column, content = location or self._current_location()
        content = content if self._filename is None else ""
        raise SyntaxError(msg, (file, line, column, content))


def is_text(value: str) -> bool:
    """Tests whether a text can be part of a file name and of a file's content."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
