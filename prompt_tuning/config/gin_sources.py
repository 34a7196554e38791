"""Reads a config's files and bindings within limits, and checks that they are data.

You may have got a config with somebody else's model or run, so it may only set values.
gin's import statements run code and are refused. All files, included ones too, are read
and parsed before gin applies the first binding; gin then reads the same texts, and
opens and imports nothing itself.
"""

import dataclasses
import difflib
import io
import itertools
import os
import re
from pathlib import Path
from typing import Any

from gin import config as gin_config
from gin import config_parser

from prompt_tuning.config.data_parser import DataParser, NamedText
from prompt_tuning.config.shipped_configs import list_configs
from prompt_tuning.core.config_folder import CONFIG_FOLDERS
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.typed_json import read_limited

MAXIMUM_BYTES = 2**20
"""Maximum size of all files of a config; a file counts each time it is included."""
MAXIMUM_INCLUDES = 100
"""Maximum number of include statements that are followed."""
MAXIMUM_INCLUDE_DEPTH = 10

STEPS = "Run.steps"
MODEL = "Run.model"
"""The binding by which the file of a run is recognized."""


class ConfigSources:
    """Texts of files by path, checked as far as possible without gin."""

    def __init__(self, *, allow_imports: bool = False):
        self._allow_imports = allow_imports
        self._texts: dict[str, str] = {}
        self._bytes = self._includes = 0
        # Values that each given file sets, such as those of Run.prompt.
        self._given: dict[str, dict[str, Any]] = {}
        self._bound: set[str] = set()
        self._macros: dict[str, Any] = {}
        self._references = _References()
        self._words: set[str] = set()
        self._values: dict[str, Any] = {}

    @property
    def words(self) -> frozenset[str]:
        """All words of the texts, among them every name that they refer to."""
        return frozenset(self._words)

    @property
    def macros(self) -> set[str]:
        """Names of the macros that the texts use."""
        return self._references.macros

    @property
    def describes_model(self) -> bool:
        """Whether the files set no field of the run but its model."""
        names = {name for values in self._given.values() for name in values}
        of_run = {name for name in names if name.rpartition("/")[2].startswith("Run.")}
        return of_run == {MODEL}

    @property
    def checkpoint(self) -> str | None:
        """Path or name of the model in the files; None if they name none."""
        for values in reversed(self._given.values()):
            path = values.get("Pretrained.checkpoint")
            if isinstance(path, str):
                return path
        path = self._macros.get("MODEL")
        return path if isinstance(path, str) else None

    def by_factory(self) -> dict[str, dict[str, Any]]:
        """Returns the files' values by factory and parameter; see `read_values`."""
        found: dict[str, dict[str, Any]] = {}
        for values in self._given.values():
            for name, value in values.items():
                factory, _, parameter = name.rpartition("/")[2].rpartition(".")
                macro = str(value)[1:] if isinstance(value, _Reference) else ""
                value = self._macros.get(macro, value)
                found.setdefault(factory.rpartition(".")[2], {})[parameter] = value
        return found

    def check_file(self, name: str) -> None:
        """Reads and checks a file and all that it includes.

        SyntaxError if gin cannot parse it.
        """
        self._values = self._given.setdefault(name, {})
        self._check_file(name, "", ())

    def check_binding(self, binding: str) -> None:
        """Checks a binding; see `check_file`."""
        self._values = {}
        self._words |= set(re.findall(r"\w+", binding))
        try:
            self._check_text(binding, ())
        except InputError as error:
            name = shortened(binding.partition("=")[0].strip())
            raise InputError(f"--gin.{name}: {error}") from error
        self._bound |= self._values.keys()

    def check_order(self) -> None:
        """Refuses a file that silently undoes the purpose of a file given before it.

        The file of an adapter or a prompt changes what a run trains, so it belongs
        after the file of the run, which is recognized by its number of steps. Call this
        after all files and bindings are checked.
        """
        for earlier, later in itertools.combinations(self._given, 2):
            before, values = self._given[earlier], self._given[later]
            is_run = STEPS in values
            if STEPS in before:
                continue
            shared = before.keys() & values.keys() - self._bound
            for name in sorted(
                shared, key=lambda key: (not key.startswith("Run."), key)
            ):
                if before[name] == values[name]:
                    continue
                if is_run or name.startswith("Run."):
                    advice = f"give one of them, or set --gin.{name}"
                    if is_run:
                        advice = f"give {shown(earlier)} after {shown(later)}"
                    raise InputError(
                        f"{shown(later)} sets {name} = {shown(values[name])}, which "
                        f"undoes {name} = {shown(before[name])} of {shown(earlier)}, "
                        f"given before it: {advice}"
                    )

    def use_in_gin(self) -> None:
        """Lets gin read the checked texts, and nothing else, with `DataParser`."""
        allow_imports = self._allow_imports

        class Parser(DataParser):
            def __init__(self, source: Any, delegate: Any):
                super().__init__(source, delegate, allow_imports=allow_imports)

        def parse_file(name: str, skip_unknown: Any = False) -> Any:
            del skip_unknown
            path = _find(name, "")
            includes, imports = gin_config.parse_config(
                NamedText(self._texts[path], path)
            )
            return gin_config.ParsedConfigFileIncludesAndImports(
                name, imports, includes
            )

        setattr(gin_config.config_parser, "ConfigParser", Parser)  # noqa: B010
        setattr(gin_config, "parse_config_file", parse_file)  # noqa: B010

    def _check_file(self, name: str, origin: str, outer: tuple[str, ...]) -> None:
        path = _find(name, origin)
        real = os.path.realpath(path)
        if real in outer:
            raise InputError(
                f"{shown(name)}{origin} includes itself; remove the include"
            )
        content = read_limited(Path(path), MAXIMUM_BYTES)
        self._bytes += len(content)
        if self._bytes > MAXIMUM_BYTES:
            raise InputError(
                f"the files of the config have {self._bytes:,} bytes or more, expected "
                f"at most {MAXIMUM_BYTES:,}"
            )
        try:
            text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not text in UTF-8: {error.reason}") from None
        self._texts[path] = text
        self._words |= set(re.findall(r"\w+", text))
        self._check_text(NamedText(text, path), (*outer, real))

    def _check_text(self, source: Any, outer: tuple[str, ...]) -> None:
        parser = DataParser(source, self._references, allow_imports=self._allow_imports)
        for statement in parser:
            if isinstance(statement, config_parser.BindingStatement):
                self._add(statement)
            if not isinstance(statement, config_parser.IncludeStatement):
                continue
            file, line, *_ = statement.location
            origin = "" if file is None else f'\n  In file "{file}", line {line}'
            self._includes += 1
            if self._includes > MAXIMUM_INCLUDES:
                raise InputError(
                    f"the config has {self._includes} include statements or more, "
                    f"expected at most {MAXIMUM_INCLUDES}{origin}"
                )
            if len(outer) > MAXIMUM_INCLUDE_DEPTH:
                raise InputError(
                    f"files include each other {len(outer)} levels deep, expected at "
                    f"most {MAXIMUM_INCLUDE_DEPTH}{origin}"
                )
            self._check_file(statement.filename, origin, outer)

    def _add(self, statement: config_parser.BindingStatement) -> None:
        """Keeps a value; a macro, which is set to be overridden, in another table."""
        if statement.arg_name:
            scope = f"{statement.scope}/" if statement.scope else ""
            name = f"{scope}{statement.selector}.{statement.arg_name}"
            self._values[name] = statement.value
        else:
            self._macros[statement.selector] = statement.value


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A reference or a macro, as it is written."""

    text: str

    def __repr__(self) -> str:
        return self.text


class _References(config_parser.ParserDelegate):
    """Keeps references and macros as they are written; `macros` are names."""

    def __init__(self):
        self.macros: set[str] = set()

    def configurable_reference(
        self, scoped_configurable_name: str, evaluate: bool
    ) -> _Reference:
        return _Reference(f"@{scoped_configurable_name}{'()' * evaluate}")

    def macro(self, macro_name: str) -> _Reference:
        self.macros.add(macro_name)
        return _Reference(f"%{macro_name}")


def _find(name: str, origin: str) -> str:
    """Returns the path that gin reads for the name of a file."""
    folders = [""]
    if not Path(name).is_absolute():
        folders += map(str, filter(Path.is_dir, CONFIG_FOLDERS))
    # `Path` would write the name in another way than gin looks it up.
    paths = [os.path.join(folder, name) for folder in folders]  # noqa: PTH118
    for path in paths:
        if os.path.isfile(path):  # noqa: PTH113
            return path
    # The message for a name on the command line is read without quotes.
    short = name if len(name) < 200 else shown(name)
    if any(map(os.path.isdir, paths)):
        raise InputError(f"{short} is a folder, expected a gin file{origin}")
    searched = " or ".join(str(folder) for folder in folders if folder)
    near = difflib.get_close_matches(name[:200], list_configs(), n=1, cutoff=0.7)
    question = f"; did you mean {near[0]}?" if near else ""
    raise InputError(
        f"{short} is missing{question}{origin}\nnames are searched in the working "
        f"directory and in {searched or 'no other folder'}"
    )
