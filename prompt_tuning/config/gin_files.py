"""Reads runs from gin files; the only module that uses gin.

The factories that a config can bind are plain dataclasses, classes and functions of the
package. gin calls a factory to build the object that the config describes.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import tokenize
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gin

from prompt_tuning import losses
from prompt_tuning.config.configured import factory_signature
from prompt_tuning.config.gin_sources import ConfigSources
from prompt_tuning.config.gin_values import check_values
from prompt_tuning.config.python_objects import (
    ObjectiveFromPython,
    optimizer_from_python,
)
from prompt_tuning.config.run import CONFIG_FILE, DataSource, Evaluation, Run
from prompt_tuning.config.shipped_configs import CONFIG_FOLDERS
from prompt_tuning.config.values_in_use import check_used, unused_bindings
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.model_config import t5_config
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.prompts.kinds import load_factories
from prompt_tuning.prompts.prompt_module import PromptFactory, PromptModule
from prompt_tuning.sharding.axis_rules import AxisRules
from prompt_tuning.sharding.mesh import MeshShape

FACTORIES = (
    Run,
    Pretrained,
    Rematerialization,
    DataSource,
    Evaluation,
    *(
        getattr(import_module(module), name)
        for name, module in losses.FACTORIES.items()
    ),
    ObjectiveFromPython,
    optimizer_from_python,
    MeshShape,
    AxisRules,
    parameter_groups.ParameterGroup,
    parameter_groups.adafactor,
    parameter_groups.adamw,
    parameter_groups.warmup_linear_decay,
    t5_config,
    *load_factories(),
)

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


@functools.cache
def factory_names() -> frozenset[str]:
    """Returns the names that a config can refer to."""
    return frozenset(factory.__name__ for factory in FACTORIES)


@functools.cache
def prompt_names() -> frozenset[str]:
    """Returns the names of prompt classes, which a run calls with its vocabulary."""
    return frozenset(
        factory.__name__
        for factory in FACTORIES
        if "vocabulary" in factory_signature(factory).parameters
    )


@functools.cache
def register() -> None:
    """Registers the package's factories with gin, once."""
    for factory in FACTORIES:
        gin.external_configurable(factory, module="prompt_tuning")
    for folder in filter(Path.is_dir, CONFIG_FOLDERS):
        gin.add_config_file_search_path(str(folder))


def read_run(
    files: Sequence[str],
    bindings: Sequence[str],
    directory: str | None = None,
    *,
    allow_imports: bool = False,
    allow_unused: bool = False,
) -> Run:
    """Parses gin files and bindings, and builds the run that they describe.

    Args:
      files: paths, or names below `configs/` such as "runs/first_prompt.gin".
      bindings: bindings such as `Run.steps = 10`, which override the files.
      directory: directory of the run, which overrides the config's.
      allow_imports: whether the config may import modules, which runs their code.
      allow_unused: whether bindings may set parameters that the run does not use.

    Raises:
      InputError: for a missing file or include, an import statement, a misspelled name
        or parameter, a config without a model, an unused binding, and for values that
        cannot be used.
    """
    register()
    gin.clear_config()
    sources = ConfigSources(allow_imports=allow_imports)
    # Check everything before gin applies anything.
    for file in files:
        with _explained(f"the config {shortened(file)}"):
            sources.check_file(file)
    for binding in bindings:
        with _explained(_option(binding)):
            sources.check_binding(binding)
    sources.check_order()
    sources.use_in_gin()
    for file in files:
        with _explained(f"the config {shortened(file)}"):
            gin.parse_config_file(file)
    for binding in bindings:
        with _explained(_option(binding)):
            gin.parse_config(binding)
    _check_macros(bindings)
    with _explained(f"the config {_names(files)}"):
        check_values({factory.__name__: factory for factory in FACTORIES})
    _check_model(files)
    if directory is not None:
        gin.bind_parameter("Run.directory", directory)
    with _explained(f"the config {_names(files)}"):
        gin.finalize()
        run = gin.get_configurable(Run)()
    if not allow_unused:
        check_used(unused_bindings(bindings))
    return dataclasses.replace(
        run,
        prompt=run.prompt and _Explained(run.prompt),
        decoder_prompt=run.decoder_prompt and _Explained(run.decoder_prompt),
    )


def read_run_directory(
    directory: Path,
    bindings: Sequence[str] = (),
    files: Sequence[str] = (),
    *,
    allow_imports: bool = False,
) -> Run:
    """Reads the run of a directory.

    Args:
      directory: a run directory with its config.
      bindings: override the config, as `files` do.
      files: gin files.
      allow_imports: see `read_run`.

    Raises:
      InputError: if the config cannot be used.
    """
    config = str(directory / CONFIG_FILE)
    run = read_run([config, *files], bindings, allow_imports=allow_imports)
    # The directory may have been moved since the run wrote its config.
    return dataclasses.replace(run, directory=str(directory))


def _check_macros(bindings: Sequence[str]) -> None:
    """Refuses a macro of the command line that the config does not use.

    Raises:
      InputError: with the nearest macros that the config uses.
    """
    used = sorted(set(re.findall(r"%(\w+)", gin.config_str())))
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if re.fullmatch(r"\w+", name) and name not in used:
            raise InputError(
                f"--gin.{shortened(name)} is used by nothing in the config"
                f"{_nearest(name, used)}"
            )


def _names(files: Sequence[str]) -> str:
    return shortened(", ".join(files)) or "(no file)"


def _option(binding: str) -> str:
    """Returns a binding as it is given on the command line."""
    return f"--gin.{shortened(binding.replace(' = ', '=', 1))}"


def _check_model(files: Sequence[str]) -> None:
    """Refuses a config that is empty or has no model.

    Raises:
      InputError: with what to add.
    """
    try:
        gin.query_parameter("Run.model")
    except ValueError:
        config = f"the config {_names(files)}" if files else "the config"
        state = "incomplete" if gin.config_str().strip() else "empty"
        raise InputError(
            f"{config} is {state}: it does not set Run.model, the frozen model; add a "
            "config that does, such as --gin_file models/checkpoint.gin ("
            "`prompt-tuning configs` lists them)"
        ) from None


@dataclasses.dataclass(frozen=True)
class _Explained:
    """A prompt's factory, whose errors become an `InputError`."""

    factory: PromptFactory

    @property
    def keywords(self) -> dict[str, Any]:
        """The bound initializer, named as in a `functools.partial`."""
        try:
            name = f"{self.factory.__name__}.initializer"
            return {"initializer": gin.query_parameter(name)}
        except ValueError:
            return {}

    def __call__(self, *arguments: Any) -> PromptModule:
        # Other errors are not caused by the config.
        with _explained("the config's prompt", (ValueError, TypeError)):
            return self.factory(*arguments)


@contextlib.contextmanager
def _explained(
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
        return shortened(text) + _nearest(parameter, _parameters(name))
    if "No configurable matching" in text:
        name = re.findall(r"'([^']*)'", text)[0]
        return shortened(text) + _nearest(name, sorted(factory_names()))
    return shortened(text, MAXIMUM_TEXT) + _callee(problem)


def _callee(problem: Exception) -> str:
    """Names the factory that raised an error, as gin reports it."""
    match = re.search(r"In call to configurable '([\w.]+)'", str(problem))
    return f", in {match[1]}" if match else ""


def _parameters(name: str) -> list[str]:
    """Returns the parameters of a factory; gin may prefix its name with a module."""
    factories = [f for f in FACTORIES if f.__name__ == name.rpartition(".")[2]]
    return [p for f in factories for p in inspect.signature(f).parameters]


def _nearest(name: str, expected: Sequence[str]) -> str:
    near = difflib.get_close_matches(name[:100], expected, n=3) or sorted(expected)
    return f"\nexpected {' or '.join(near)}"


def _unbound_macros() -> str:
    config = gin.config_str()
    bound = set(re.findall(r"^(\w+) = ", config, re.MULTILINE))
    unbound = sorted(set(re.findall(r"%(\w+)", config)) - bound)
    examples = " ".join(f"--gin.{name}=..." for name in unbound)
    return f"it needs {', '.join(unbound)}; set {examples}"


def _without_calls(text: str) -> str:
    return text.partition("\n  In call to configurable")[0]
