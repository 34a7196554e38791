"""gin, and the only place that knows of it.

What is bound here are plain dataclasses, classes and functions of the package; bound
in gin, each is a factory that is called to build the thing.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gin
from gin import config as gin_config

from prompt_tuning import losses
from prompt_tuning.config.configured import factory_signature
from prompt_tuning.config.python_objects import (
    ObjectiveFromPython,
    optimizer_from_python,
)
from prompt_tuning.config.run import CONFIG_FILE, DataSource, Evaluation, Run
from prompt_tuning.config.shipped_configs import CONFIG_FOLDERS
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
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

# What gin raises, and what the factories raise for values of a wrong type.
PROBLEMS = (
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    AttributeError,
    ImportError,
    NameError,
    RuntimeError,
    tokenize.TokenError,
)


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
    """Makes the package's factories known to gin, once."""
    for factory in FACTORIES:
        gin.external_configurable(factory, module="prompt_tuning")
    # gin also looks into importable packages; it takes a folder `runs/` of the working
    # directory for one, and fails there before it comes to our folders.
    gin_config._FILE_READERS[:] = [(open, os.path.isfile)]
    for folder in filter(Path.is_dir, CONFIG_FOLDERS):
        gin.add_config_file_search_path(str(folder))


def read_run(
    files: Sequence[str], bindings: Sequence[str], directory: str | None = None
) -> Run:
    """Parses gin files and bindings, and builds the run that they describe.

    Args:
      files: paths, or names below `configs/` such as "runs/first_prompt.gin".
      bindings: such as `Run.steps = 10`; they override the files.
      directory: of the run, in place of the one that the config names.

    Raises:
      InputError: for a missing file or include, a misspelt name or parameter, and
        whatever the values themselves are refused for.
    """
    register()
    gin.clear_config()
    for file in files:
        with _explained(f"the config {file}"):
            gin.parse_config_file(file)
    for binding in bindings:
        with _explained(f"--gin.{binding.replace(' = ', '=', 1)}"):
            gin.parse_config(binding)
    _check_macros(bindings)
    if directory is not None:
        gin.bind_parameter("Run.directory", directory)
    with _explained(f"the config {', '.join(files) or '(no file)'}"):
        gin.finalize()
        run = gin.get_configurable(Run)()
    return dataclasses.replace(
        run,
        prompt=run.prompt and _Explained(run.prompt),
        decoder_prompt=run.decoder_prompt and _Explained(run.decoder_prompt),
    )


def read_run_directory(
    directory: Path, bindings: Sequence[str] = (), files: Sequence[str] = ()
) -> Run:
    """Reads the run of a directory.

    Args:
      directory: a run directory with its config.
      bindings: override the config, as `files` do.
      files: gin files.

    Raises:
      InputError: if the config cannot be used.
    """
    run = read_run([str(directory / CONFIG_FILE), *files], bindings)
    # The directory may have been moved since the run wrote its config.
    return dataclasses.replace(run, directory=str(directory))


def _check_macros(bindings: Sequence[str]) -> None:
    """Refuses a macro of the command line that nothing refers to.

    Raises:
      InputError: with the nearest macros that are used.
    """
    used = sorted(set(re.findall(r"%(\w+)", gin.config_str())))
    for binding in bindings:
        name = binding.partition("=")[0].strip()
        if re.fullmatch(r"\w+", name) and name not in used:
            raise InputError(
                f"--gin.{name} is used by nothing in the config{_nearest(name, used)}"
            )


@dataclasses.dataclass(frozen=True)
class _Explained:
    """A factory that gin builds from its bindings only once it is called."""

    factory: PromptFactory

    @property
    def keywords(self) -> dict[str, Any]:
        """The initialiser that is bound, as `functools.partial` would name it."""
        try:
            name = f"{self.factory.__name__}.initializer"
            return {"initializer": gin.query_parameter(name)}
        except ValueError:
            return {}

    def __call__(self, *arguments: Any) -> PromptModule:
        # What else is raised there is ours or the machine's, and not the config's.
        with _explained("the config's prompt", (ValueError, TypeError)):
            return self.factory(*arguments)


@contextlib.contextmanager
def _explained(
    what: str, problems: tuple[type[Exception], ...] = PROBLEMS
) -> Iterator[None]:
    """Turns what gin raises into an `InputError` with what is of use in it."""
    try:
        yield
    except InputError as problem:
        # Without the chain of gin's calls that led there.
        raise InputError(_without_calls(str(problem))) from problem
    except problems as problem:
        raise InputError(f"{what} cannot be used: {_explain(problem)}") from problem


def _explain(problem: Exception) -> str:
    text = _without_calls(str(problem))
    if isinstance(problem, OSError):
        missing, found = re.match(r"Unable to open file: (.*)\. Searched", text), text
        if missing is not None:
            found = f"{missing[1]} is missing" + "".join(text.partition("\n")[1:])
        folders = " or ".join(str(f) for f in CONFIG_FOLDERS if f.is_dir())
        return (
            f"{found}\nnames are looked for in the working directory and in {folders}"
        )
    if "No bindings specified for" in text:
        return _unbound_macros()
    if isinstance(problem, SyntaxError) or "malformed node" in text:
        line = (getattr(problem, "text", None) or "").strip()
        return (
            f"a value cannot be parsed{f' in the line {line!r}' if line else ''}; text "
            "needs quotes inside the shell's: --gin.MODEL='\"folder\"'"
        )
    if isinstance(problem, ValueError) and "n't have a parameter" in text:
        name, parameter = re.findall(r"'([\w.]+)'", text)[:2]
        return text + _nearest(parameter, _parameters(name))
    if "No configurable matching" in text:
        found = re.findall(r"'([^']*)'", text)[0]
        return text + _nearest(found, [factory.__name__ for factory in FACTORIES])
    return text + _callee(problem)


def _callee(problem: Exception) -> str:
    """Which factory of the config raised it, as gin says."""
    found = re.search(r"In call to configurable '([\w.]+)'", str(problem))
    return f", in {found[1]}" if found else ""


def _parameters(name: str) -> list[str]:
    """The parameters of a factory, which gin may name with its module."""
    named = [f for f in FACTORIES if f.__name__ == name.rpartition(".")[2]]
    return [p for f in named for p in inspect.signature(f).parameters]


def _nearest(found: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(found, known, n=3) or sorted(known)
    return f"\nexpected {' or '.join(near)}"


def _unbound_macros() -> str:
    config = gin.config_str()
    bound = set(re.findall(r"^(\w+) = ", config, re.MULTILINE))
    unbound = sorted(set(re.findall(r"%(\w+)", config)) - bound)
    examples = " ".join(f"--gin.{name}=..." for name in unbound)
    return f"it needs {', '.join(unbound)}; set {examples}"


def _without_calls(text: str) -> str:
    return text.partition("\n  In call to configurable")[0]


def bound_config() -> str:
    """All values that files and bindings gave, by name; known once a run is read."""
    return gin.config_str()


def operative_config() -> str:
    """All values in use, defaults included; as a gin file it starts the run again."""
    return gin.operative_config_str()


def complete_config() -> str:
    """Returns the operative config of the run, with the factories not called yet.

    gin's operative config has only the factories that were called. Prompts and their
    initializers are called once the model is open, so this adds every factory that the
    config refers to, with its bindings and defaults.
    """
    complete = {key: dict(value) for key, value in _operative().items()}
    pending = list(gin_config.iterate_references(complete))
    while pending:
        reference = pending.pop()
        key = reference.config_key
        if key not in complete:
            complete[key] = _parameters_in_use(reference)
            pending += gin_config.iterate_references(complete[key])
    return gin_config._config_str(complete)


def _operative() -> dict[tuple[str, str], dict[str, Any]]:
    return gin_config._OPERATIVE_CONFIG


def _parameters_in_use(reference: Any) -> dict[str, Any]:
    """Returns the defaults of a reference's factory, overridden by its bindings."""
    scope, selector = reference.config_key
    configurable = reference.configurable
    values = dict(
        gin_config._get_default_configurable_parameter_values(
            configurable.wrapped, configurable.allowlist, configurable.denylist
        )
    )
    # A scope's bindings add to those of the scopes around it.
    parts = scope.split("/") if scope else []
    for depth in range(len(parts) + 1):
        outer = "/".join(parts[:depth])
        values |= gin_config._CONFIG.get((outer, selector), {})
    return values
