"""A config as it is given on the command line, parsed and checked by gin.

Everything is checked that needs no factory to be called.
"""

import contextlib
import dataclasses
import functools
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config

from prompt_tuning.config import recorded_paths
from prompt_tuning.config.deferred_factories import GIVEN_BY_THE_RUN, factory_signature
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.flat_options import TABLE
from prompt_tuning.config.gin_sources import ConfigSources
from prompt_tuning.config.gin_values import check_values
from prompt_tuning.config.option_checks import Choices, option_bindings
from prompt_tuning.core.config_folder import CONFIG_FOLDERS
from prompt_tuning.core.errors import InputError, did_you_mean, shortened, shown
from prompt_tuning.core.private_parts import private_part

MODULE = "prompt_tuning"
"""Module of the factories in gin's operative config."""
EXAMPLES = "ContextPrompt.examples"
Factories = Mapping[str, Callable[..., Any]]

# Raised by gin, or by factories that are given values of a wrong type.
PROBLEMS = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    AttributeError,
    ImportError,
    NameError,
    RuntimeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    tokenize.TokenError,
)
MAXIMUM_TEXT = 1000
"""Maximum length of an error's text in a message."""


@dataclasses.dataclass(frozen=True)
class GivenConfig:
    """Gin files and bindings, read and checked to be data.

    Attributes:
      files: paths, or names below `configs/`.
      bindings: bindings such as `Run.steps = 10`, which override the files.
      sources: texts of all files.
      defaults: bindings that `bindings` override, and that may be unused.
    """

    files: Sequence[str]
    bindings: Sequence[str]
    sources: ConfigSources
    defaults: Sequence[str] = ()

    @classmethod
    def read(
        cls,
        files: Sequence[str],
        bindings: Sequence[str],
        *,
        choices: Choices | None = None,
        defaults: Sequence[str] = (),
        allow_imports: bool,
    ) -> "GivenConfig":
        """Reads the files and all that they include; see `read_run`."""
        sources = ConfigSources(allow_imports=allow_imports)
        for file in files:
            with explained(f"the config {shortened(file)}"):
                sources.check_file(file)
        bindings = [
            *option_bindings(choices or {}, sources.macros, sources.words),
            *bindings,
        ]
        for binding in (*defaults, *bindings):
            with explained(_option(binding)):
                sources.check_binding(binding)
        sources.check_order()
        return cls(files, bindings, sources, defaults)

    @property
    def label(self) -> str:
        """The config in a message."""
        return f"the config {shortened(', '.join(self.files)) or '(no file)'}"

    def build(self, factories: Factories, directory: str | None = None) -> Any:
        """Lets gin build the config's run with the factories, by name.

        `directory` overrides the config's directory of the run.
        """
        gin.clear_config()
        _add_search_paths()
        self.sources.use_in_gin()
        for file in self.files:
            with explained(f"the config {shortened(file)}"):
                gin_config.parse_config_file(file)
                recorded_paths.locate_in_gin(file)
        for binding in (*self.defaults, *self.bindings):
            with explained(_option(binding)):
                gin.parse_config(binding)
        if any(map(recorded_paths.is_run_config, self.files)):
            _override_scopes(self.bindings)
        _check_macros(self.bindings)
        with explained(self.label):
            _read_examples(factories)
            check_values(factories)
        _check_model(self.label if self.files else "the config")
        if directory is not None:
            gin.bind_parameter("Run.directory", directory)
        with explained(self.label):
            gin.finalize()
            return gin.get_configurable("Run")()


def _read_examples(factories: Factories) -> None:
    """Puts examples in place of their file, so that a run's config keeps them."""
    for _, owner, key in recorded_paths.value_holders(EXAMPLES.__eq__):
        prompt: Any = factories[EXAMPLES.partition(".")[0]]
        owner[key] = prompt.read_examples(owner[key])


def model_in_files(files: Sequence[str]) -> dict[str, str] | None:
    """Returns the option `model` that gin files set, if they describe a model alone.

    Options then configure the rest of a run, as they do without files. The result is
    empty if the files name no checkpoint, and None if they describe more than a model.
    """
    sources = GivenConfig.read(files, (), allow_imports=True).sources
    if not sources.describes_model:
        return None
    checkpoint = sources.checkpoint
    return {} if checkpoint is None else {"model": checkpoint}


def read_values(file: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the values of a config by factory and parameter, for display.

    If more than one scope configures a factory, the values of one count. References are
    kept as the config writes them.
    """
    return GivenConfig.read([file], (), allow_imports=False).sources.by_factory()


@functools.cache
def _add_search_paths() -> None:
    for folder in filter(Path.is_dir, CONFIG_FOLDERS):
        gin.add_config_file_search_path(str(folder))


def _override_scopes(bindings: Sequence[str]) -> None:
    """Lets bindings without a scope override values that have one.

    A run writes the values of every scope to its config, also those that were given
    without a scope.
    """
    names = [binding.partition("=")[0].strip() for binding in bindings]
    config = private_part("gin.config._CONFIG")
    for name in names:
        if "." not in name or "/" in name:
            continue
        key = gin_config.ParsedBindingKey.parse(name)
        value = config["", key.complete_selector][key.arg_name]
        for (scope, selector), values in config.items():
            if selector == key.complete_selector and f"{scope}/{name}" not in names:
                values.update({key.arg_name: value} if key.arg_name in values else {})


def register(factories: Factories) -> None:
    """Registers factories with gin."""
    for factory in factories.values():
        gin.external_configurable(factory, module=MODULE)


def _option(binding: str) -> str:
    return f"--gin.{shortened(binding.replace(' = ', '=', 1))}"


def _check_macros(bindings: Sequence[str]) -> None:
    """Refuses a macro of the command line that the config does not use."""
    used = sorted(set(re.findall(r"%(\w+)", gin.config_str())))
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if re.fullmatch(r"\w+", name) and name not in used:
            raise InputError(
                f"no setting {shortened(name)} in this config{did_you_mean(name, used)}"
            )


def _check_model(config: str) -> None:
    """Refuses a config without a model; it may even be empty."""
    try:
        gin.query_parameter("Run.model")
    except ValueError:
        state = "incomplete" if gin.config_str().strip() else "empty"
        raise InputError(
            f"{config} is {state}: it does not set Run.model, the frozen model; add a "
            "config that does, such as --gin_file models/checkpoint.gin ("
            "`prompt-tuning configs` lists them)"
        ) from None


@contextlib.contextmanager
def explained(
    source: str, problems: tuple[type[Exception], ...] = PROBLEMS
) -> Iterator[None]:
    """Turns an error of gin into an `InputError` with the useful part of its text."""
    try:
        yield
    except InputError as problem:
        # Leave out gin's chain of calls.
        raise InputError(_without_calls(str(problem))) from problem
    except problems as problem:
        raise InputError(f"{source} cannot be used: {_explain(problem)}") from problem


def _explain(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "it refers to itself, or is nested too deeply"
    text = _without_calls(str(problem)).rstrip()
    if "No bindings specified for" in text:
        return _unbound_macros()
    if isinstance(problem, tokenize.TokenError):
        return "a bracket or a quote is not closed"
    if isinstance(problem, SyntaxError):
        line = (getattr(problem, "text", None) or "").strip()
        where = f" in the line {shown(line)}" if line else ""
        if problem.filename:
            where = f" in line {problem.lineno} of {problem.filename}"
        return (
            f"a value cannot be parsed{where}; text needs quotes inside the shell's: "
            "--gin.MODEL='\"folder\"'"
        )
    if isinstance(problem, ValueError) and "n't have a parameter" in text:
        name, parameter = re.findall(r"'([\w.]+)'", text)[:2]
        return _with_nearest(text, parameter, _parameters(name))
    if "No configurable matching" in text:
        name = re.findall(r"'([^']*)'", text)[0]
        return _with_nearest(text, name, FACTORIES)
    return shortened(text, MAXIMUM_TEXT) + _callee(problem)


def _callee(problem: Exception) -> str:
    match = re.search(r"In call to configurable '([\w.]+)'", str(problem))
    return f", in {match[1]}" if match else ""


def _parameters(name: str) -> list[str]:
    names = factory_signature(gin.get_configurable(name)).parameters
    return [name for name in names if name not in GIVEN_BY_THE_RUN]


def _with_nearest(text: str, name: str, known: Iterable[str]) -> str:
    """Adds the nearest names to the first line of gin's text."""
    first, newline, location = shortened(text).partition("\n")
    return f"{first.rstrip('.')}{did_you_mean(name, known)}{newline}{location}"


def _unbound_macros() -> str:
    config = gin.config_str()
    bound = set(re.findall(r"^(\w+) = ", config, re.MULTILINE))
    unbound = sorted(set(re.findall(r"%(\w+)", config)) - bound)
    options = {option.macro: f"{option.flag} ..." for option in TABLE}
    examples = " ".join(options.get(name, f"--gin.{name}=...") for name in unbound)
    return f"it needs {', '.join(unbound)}; set {examples}"


def _without_calls(text: str) -> str:
    """Leaves out gin's calls, and the lines of files, which an include may name."""
    text = text.partition("\n  In call to configurable")[0]
    place = r'(\n  In file ".*", line \d+)'
    return re.sub(rf"{place}\n    (?s:.*?)(?={place}|\Z)", r"\1", text)
