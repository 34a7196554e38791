"""Writes the stubs that tell editors and type checkers the public names.

`prompt_tuning/__init__.py` imports its names when they are first used, and settings
such as `SoftPrompt(length=20)` only record what is set, so no checker can see either.
The stubs are written from the objects themselves: their parameters, types, defaults
and docstrings.

    python -m scripts.make_stub   # after a public signature or docstring has changed

tests/test_front_door.py fails if a stub is out of date.
"""

import collections
import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import optax

import prompt_tuning as pt
from prompt_tuning.api import model, tune
from prompt_tuning.config.deferred_factories import (
    Configured,
    factory_named,
    factory_signature,
    parameter_names,
)
from prompt_tuning.config.python_runs import SET_BY_TUNE
from prompt_tuning.config.run import GivenObjective
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.losses.objective import ObjectiveConfig
from prompt_tuning.prompts.factorized import Factors
from prompt_tuning.prompts.initializers import Initializer, TextInitializer
from prompt_tuning.prompts.prefix import PrefixInitializer
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import (
    InputPrompt,
    InputPromptFactory,
    PromptFactory,
    PromptModule,
)

PACKAGE = Path(__file__).parents[1] / "prompt_tuning"
HEAD = '"""{}\n\nWritten by `python -m scripts.make_stub`; change the sources.\n"""'

Alias = tuple[str, str]
"""Module and name of a type."""

CALLED: list[tuple[Any, Alias, bool]] = [
    (PromptFactory, (PromptModule.__module__, "PromptModule"), False),
    (InputPromptFactory, (InputPrompt.__module__, "InputPrompt"), False),
    (GivenObjective, (ObjectiveConfig.__module__, "ObjectiveConfig"), False),
    (Initializer, ("prompt_tuning.prompts.initializers", "Initializer"), True),
    (PrefixInitializer, ("prompt_tuning.prompts.prefix", "PrefixInitializer"), True),
    (
        TextInitializer,
        ("prompt_tuning.prompts.initializers", "TextInitializer"),
        True,
    ),
    (Factors, ("prompt_tuning.prompts.factorized", "Factors"), True),
    (optax.Schedule, ("optax", "Schedule"), True),
    (optax.GradientTransformation, ("optax", "GradientTransformation"), True),
]
"""What is given as settings of a type; whether the object itself may be given too."""

SETTINGS = (AdapterSpec, ModelConfig, ObjectiveConfig)
"""Classes that are given as settings, but are not called by a public name."""

ROWS = {("Evaluation", "data"), ("DataSource", "files")}
"""Parameters that take data in every form of `tune`, which no type describes."""
FILLED_IN = {
    ("warmup_linear_decay", "steps"),
    ("warmup_cosine_decay", "steps"),
}
"""Required parameters that a run fills in if they are left out."""

ARGUMENTS = {
    "Method": "Configured[PromptModule] | Configured[AdapterSpec] | "
    "Configured[_TrainedTokens] | Configured[_ClassHead] | functools.partial[Any] | "
    "type[PromptModule]",
    "Methods": 'Method | Sequence[Method] | Literal["auto"]',
    "Objectives": "Configured[ObjectiveConfig] | LossFunctions | LossFunction",
    "Optimizer": "Configured[optax.GradientTransformation] | "
    "optax.GradientTransformation",
    "LearningRates": "float | Configured[optax.Schedule]",
}
"""Types of the arguments of `tune`."""


def settable(name: str) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a factory that a user may set, by name."""
    parameters = factory_signature(factory_named(name)).parameters
    return {known: parameters[known] for known in parameter_names(name)}


def _fields(*owners: str, without: Callable[..., Any], but: Sequence[str] = ()):
    """Returns the owner of each field that a function takes besides its parameters."""
    named = {*inspect.signature(without).parameters, *but}
    return {
        field: owner
        for owner in owners
        for field in settable(owner)
        if field not in named
    }


FIELDS = {
    "PretrainedFields": _fields("Pretrained", without=tune.load),
    "TuneFields": _fields(
        "Run",
        "DataSource",
        without=tune.tune,
        but=["files", *(name for name in SET_BY_TUNE if name != "groups")],
    ),
    "BatchFields": _fields("DataSource", without=model.Model.batches, but=["files"]),
    "EvaluationFields": _fields(
        "Evaluation", "DataSource", without=model.Model.evaluate, but=["files"]
    ),
}
"""The owner of each keyword argument that a function passes on."""


class Stub:
    """A stub under construction: its imports and its lines."""

    def __init__(self):
        self.imports: dict[str, set[str]] = collections.defaultdict(set)
        self.lines: list[str] = []

    def name(self, module: str, name: str) -> str:
        """Imports a name, with an underscore if it is public, and returns it."""
        if name in pt.CONFIGURABLE:
            self.imports[module].add(f"{name} as _{name}")
            return f"_{name}"
        self.imports[module].add(name)
        return name

    def settings_of(self, module: str, name: str) -> str:
        """Returns the type of settings from which an object is built."""
        configured = self.name(Configured.__module__, "Configured")
        return f"{configured}[{self.name(module, name)}]"

    def type(self, hint: Any) -> str:
        """Returns a type of a parameter as source."""
        for called, (module, name), itself in CALLED:
            if hint is called or hint == called:
                settings = self.settings_of(module, name)
                return f"{self.name(module, name)} | {settings}" if itself else settings
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is None or hint is type(None):
            return "None"
        if hint is Any:
            return self.name("typing", "Any")
        if origin is Annotated:
            return self.type(arguments[0])
        if origin in (Union, types.UnionType):
            named = dict.fromkeys(map(self.type, arguments))
            # A type checker takes integers as floats.
            return " | ".join(x for x in named if x != "int" or "float" not in named)
        if origin is Literal:
            self.name("typing", "Literal")
            return f"Literal[{', '.join(map(repr, arguments))}]"
        if origin is not None:
            inner = ["..." if x is ... else self.type(x) for x in arguments]
            return f"{self.type(origin)}[{', '.join(inner)}]"
        if hint.__module__ == "builtins":
            return hint.__name__
        if hint.__name__ in pt.CONFIGURABLE or hint in SETTINGS:
            return self.settings_of(hint.__module__, hint.__name__)
        return self.name(hint.__module__.split("._")[0], hint.__name__)

    def parameter(self, factory: str, parameter: inspect.Parameter) -> str:
        """Returns a parameter with its type and default."""
        is_rows = (factory, parameter.name) in ROWS
        text = (
            f"{parameter.name}: {self.type(Any if is_rows else parameter.annotation)}"
        )
        if (factory, parameter.name) in FILLED_IN:
            return f"{text} = ..."
        if parameter.default is parameter.empty:
            return text
        return f"{text} = {_literal(parameter.default)}"

    def result(self, factory: Any) -> str:
        """Returns the type of the settings of a factory."""
        if isinstance(factory, type):
            return self.settings_of(factory.__module__, factory.__name__)
        hint = typing.get_type_hints(factory)["return"]
        for called, (module, name), _ in CALLED:
            if hint == called:
                return self.settings_of(module, name)
        return self.type(hint)

    def define(self, name: str) -> None:
        """Adds the function that makes the settings of a factory."""
        factory, parameters, starred = factory_named(name), [], False
        for parameter in settable(name).values():
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                parameters, starred = [*parameters, "*"], True
            parameters.append(self.parameter(name, parameter))
        head = f"def {name}({', '.join(parameters)})"
        self.lines.append(f"{head} -> {self.result(factory)}:")
        self.lines.append(_docstring(inspect.getdoc(factory) or "", 4))

    def dictionary(self, name: str, fields: Mapping[str, str]) -> None:
        """Adds a dictionary of keyword arguments, each the parameter of a factory."""
        self.lines.append(
            f"class {name}({self.name('typing', 'TypedDict')}, total=False):"
        )
        for field, factory in fields.items():
            hint = settable(factory)[field].annotation
            is_prompt = PromptFactory in get_args(hint)
            text = "Method | None" if is_prompt else self.type(hint)
            self.lines.append(f"    {field}: {text}")

    def text(self, description: str) -> str:
        """Returns the whole stub, formatted."""
        imports = [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(self.imports.items())
        ]
        source = "\n".join([HEAD.format(description), *imports, *self.lines])
        for command in (["check", "--select=I", "--fix", "--quiet"], ["format"]):
            source = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "--stdin-filename=_.pyi", "-"],
                input=source,
                capture_output=True,
                text=True,
                check=True,
                cwd=PACKAGE.parent,
            ).stdout
        return source


def _literal(value: Any) -> str:
    """Returns a default as source; an ellipsis for an object."""
    plain = value is None or type(value) in (bool, int, float, str)
    return repr(value) if plain or value == () else "..."


def _docstring(text: str, indent: int) -> str:
    """Returns a docstring as source."""
    raw = "r" if "\\" in text else ""
    lines = f'{raw}"""{text}"""' if "\n" not in text else f'{raw}"""{text}\n"""'
    return "\n".join(f"{' ' * indent}{line}".rstrip() for line in lines.split("\n"))


def package_stub() -> str:
    """Returns the stub of the package."""
    stub = Stub()
    for name, module in pt.MODULES.items():
        stub.imports[f"prompt_tuning.{module}"].add(f"{name} as {name}")
    stub.lines += [
        "__all__: list[str]",
        "__version__: str",
        "MODULES: dict[str, str]",
        "CONFIGURABLE: tuple[str, ...]",
    ]
    for name in sorted(pt.CONFIGURABLE):
        stub.define(name)
    return stub.text("The public names, as editors and type checkers see them.")


def arguments_stub() -> str:
    """Returns the stub of the types of arguments."""
    stub = Stub()
    for aliased in (Configured, PromptModule, AdapterSpec, ObjectiveConfig):
        stub.name(aliased.__module__, aliased.__name__)
    stub.name("prompt_tuning.settings.trained_tokens", "TrainedTokens")
    stub.name("prompt_tuning.settings.class_head", "ClassHead")
    stub.name("prompt_tuning.losses.foreign_objective", "LossFunctions")
    stub.name("prompt_tuning.losses.foreign_objective", "LossFunction")
    stub.name("collections.abc", "Sequence")
    stub.name("typing", "Any")
    stub.lines += ["import functools", "import optax"]
    stub.lines += [f"{name} = {hint}" for name, hint in ARGUMENTS.items()]
    for name, fields in FIELDS.items():
        stub.dictionary(name, fields)
    return stub.text("Types of arguments of the Python interface.")


STUBS = {
    PACKAGE / "__init__.pyi": package_stub,
    PACKAGE / "config" / "argument_types.pyi": arguments_stub,
}
"""The function that writes each stub."""


def main() -> None:
    """Writes all stubs."""
    for file, write in STUBS.items():
        file.write_text(write())


if __name__ == "__main__":
    main()
