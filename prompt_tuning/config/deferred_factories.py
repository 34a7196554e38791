"""Settings from Python, kept as names and values until a run is opened.

`SoftPrompt(length=20)` is a pair of bindings in gin. In Python it is a `Configured`:
the name of a factory and some of its parameters. To make one imports nothing heavy.
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from prompt_tuning.core.errors import InputError, did_you_mean

STUB = Path(__file__).parents[1] / "__init__.pyi"

GIVEN_BY_THE_RUN = ("self", "key", "vocabulary")
"""Parameters of a prompt class that the run passes and a user never sets."""

Built = TypeVar("Built", covariant=True)


@dataclasses.dataclass(frozen=True)
class Configured(Generic[Built]):
    """A factory's name and some of its parameters; `Built` is the type that it builds.

    Attributes:
      name: name that gin knows the factory by, such as "SoftPrompt".
      parameters: values by parameter name; may hold more `Configured`.
      scope: gin scope to use where a config needs one; chosen by position if empty.
    """

    name: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scope: str = ""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self)
        return f"{self.name}({given})"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())

    def replace(self, **parameters: Any) -> "Configured[Built]":
        """Returns a copy with other values of some parameters."""
        return Configured(self.name, {**self.parameters, **parameters}, self.scope)

    @property
    def factory(self) -> Any:
        """The class or function of this name."""
        return factory_named(self.name)

    def build(self) -> Any:
        """Builds the object, or a prompt class with its parameters, to be called."""
        from prompt_tuning.config.parameter_checks import check_parameter

        values = {name: built(value) for name, value in self}
        for name, value in values.items():
            check_parameter(self.factory, name, value)
        if "vocabulary" in factory_signature(self.factory).parameters:
            return functools.partial(self.factory, **values)
        try:
            return self.factory(**values)
        except TypeError as problem:
            raise InputError(f"{self.name} cannot be built: {problem}") from problem


def built(value: Any) -> Any:
    """Builds the settings in a value; other values stay as they are."""
    if isinstance(value, Configured):
        return value.build()
    if type(value) in (list, tuple):
        return type(value)(built(item) for item in value)
    return value


class Configurable:
    """A factory that is called with the parameters to set, and builds nothing yet.

    Its signature and documentation are those of the package's stub, and `help` shows
    both.
    """

    def __init__(self, name: str):
        self.name = name
        self.__name__ = self.__qualname__ = name
        self.__module__ = "prompt_tuning"

    def __call__(self, *arguments: Any, **parameters: Any) -> Configured:
        """Checks the parameters' names and returns the settings."""
        known = parameter_names(self.name)
        if len(arguments) > len(known):
            raise InputError(
                f"{self.name} takes {len(known)} parameters, found {len(arguments)}"
            )
        given = dict(zip(known, arguments, strict=False))
        for name in parameters:
            if name not in known:
                raise InputError(
                    f"{self.name} has no parameter {name!r}{did_you_mean(name, known)}"
                )
            if name in given:
                raise InputError(f"{self.name} is given {name!r} twice")
        return Configured(self.name, given | parameters)

    def __get__(self, instance: Any, owner: Any = None) -> "Configurable":
        """Returns itself. `help` shows an object with this method as a function."""
        return self

    def __repr__(self) -> str:
        return f"<configurable {self.name}>"

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ast.get_docstring(_definitions()[self.name])

    @property
    def __signature__(self) -> inspect.Signature:
        return _signature(_definitions()[self.name].args)


@functools.cache
def _definitions() -> dict[str, ast.FunctionDef]:
    """Reads the functions of the package's stub, which editors show too."""
    stub = ast.parse(STUB.read_text("utf-8"))
    return {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}


class _Source(str):
    """A type as source; a signature shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Returns the signature that a stub defines."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    unset: list[ast.expr | None] = [None]
    missing = unset * (len(arguments.args) - len(arguments.defaults))
    described = [
        *zip(arguments.args, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.arg,
                positional
                if argument in arguments.args
                else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty
                if value is None
                else ast.literal_eval(value),
                annotation=_Source(
                    ast.unparse(argument.annotation or ast.Constant(None))
                ),
            )
            for argument, value in described
        ]
    )


@functools.cache
def factory_named(name: str) -> Any:
    """Returns the factory that gin knows by a name."""
    from prompt_tuning.config.factories import import_factories

    factories = import_factories()
    if name not in factories:
        raise InputError(f"there is no setting {name!r}{did_you_mean(name, factories)}")
    return factories[name]


def factory_signature(factory: Any) -> inspect.Signature:
    """Returns a factory's signature; a class of Flax hides its constructor's."""
    if isinstance(factory, type):
        return inspect.signature(factory.__init__)
    return inspect.signature(factory)


def default_text(name: str) -> str | None:
    """Returns the default of a setting as a config writes it, or None.

    The name is for example `train/DataSource.buckets`.
    """
    from prompt_tuning.config.factories import FACTORIES

    factory, _, parameter = name.rpartition("/")[2].partition(".")
    if factory not in FACTORIES:
        return None
    found = factory_signature(factory_named(factory)).parameters.get(parameter)
    has_default = found is not None and found.default is not inspect.Parameter.empty
    return repr(found.default) if found is not None and has_default else None


@functools.cache
def parameter_names(name: str) -> tuple[str, ...]:
    """Returns the parameters of a factory that a user may set."""
    signature = factory_signature(factory_named(name))
    return tuple(n for n in signature.parameters if n not in GIVEN_BY_THE_RUN)
