"""Parameters of factories, read from their source without importing it.

The modules of factories import JAX, which takes seconds. A factory's outline has the
same name, parameters, defaults and types, so a config can be checked without them.
"""

import ast
import collections.abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.core.number_ranges import ALIASES

ROOT = Path(__file__).parents[2]
PREFIX = "prompt_tuning."
PLAIN: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str)},
    **ALIASES,
}
GENERIC: dict[str, Any] = {
    "tuple": tuple,
    **{n: getattr(collections.abc, n) for n in ("Callable", "Mapping", "Sequence")},
}
FOREIGN: dict[str, Any] = {"optax.Schedule": Callable[[Any], Any]}


class Definition(NamedTuple):
    """A class, a function or a type alias of the package, as a module defines it."""

    module: str
    node: ast.stmt


class FieldSource(NamedTuple):
    """A field of a dataclass, as a module declares it."""

    module: str
    annotation: ast.expr
    default: ast.expr | None


@functools.cache
def outline(name: str) -> Callable[..., Any]:
    """Returns a function with a factory's name, parameters, defaults and types.

    Calling the function does nothing. A type is `Any` unless it is built in, a
    dataclass of the package, or made of these; a default that is not a literal is an
    `ast.expr`.
    """
    definition = _definition(FACTORIES[name], name)
    assert definition is not None
    parameters = list(_parameters(definition))
    factory: Any = lambda **_: None  # noqa: E731 - nothing may wrap it
    factory.__name__ = factory.__qualname__ = name
    factory.__annotations__ = {
        p.name: p.annotation for p in parameters if p.annotation is not p.empty
    }
    factory.__signature__ = inspect.Signature(parameters)
    return factory


def outlined_parameter(factory: str, name: str) -> inspect.Parameter:
    """Returns one parameter of a class of settings, as its outline has it."""
    definition = _definition(FACTORIES[factory], factory)
    assert definition is not None
    field = _fields(definition)[name]
    return _parameter(field.module, name, field.annotation, field.default)


@functools.cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """Returns the statements of a module that define or import a name, by name."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    named: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                named[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]):
                named[name] = node
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                named[name] = ast.Assign([node.target], value)
            case ast.ImportFrom(names=names):
                named |= {alias.asname or alias.name: node for alias in names}
    return named


def _definition(module: str, name: str) -> Definition | None:
    """Finds the definition of a name of a module; None outside of the package."""
    node = _statements(module).get(name)
    if isinstance(node, ast.ImportFrom):
        source = str(node.module)
        return _definition(source, name) if source.startswith(PREFIX) else None
    return None if node is None else Definition(module, node)


def _parameters(definition: Definition) -> Iterator[inspect.Parameter]:
    """Yields the parameters that a factory takes by name."""
    module, node = definition
    if isinstance(node, ast.FunctionDef):
        yield from _arguments(module, node.args)
    elif isinstance(node, ast.ClassDef):
        if _is_dataclass(node):
            for name, (owner, annotation, default) in _fields(definition).items():
                yield _parameter(owner, name, annotation, default)
            return
        for base in _classes(definition):
            assert isinstance(base.node, ast.ClassDef)
            for method in base.node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    yield from _arguments(base.module, method.args)
                    return


def _arguments(module: str, arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """Yields the parameters of a function's signature."""
    names = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + arguments.defaults
    pairs = zip(
        names + arguments.kwonlyargs, defaults + arguments.kw_defaults, strict=True
    )
    for argument, default in pairs:
        if argument.arg != "self":
            yield _parameter(module, argument.arg, argument.annotation, default)
    if arguments.kwarg is not None:
        yield inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD)


def _fields(definition: Definition) -> dict[str, FieldSource]:
    """Returns the fields of a dataclass and its bases by name."""
    found: dict[str, FieldSource] = {}
    for module, node in reversed(list(_classes(definition))):
        assert isinstance(node, ast.ClassDef)
        for field in node.body:
            match field:
                case ast.AnnAssign(annotation=ast.Subscript(ast.Name("ClassVar"))):
                    pass
                case ast.AnnAssign(ast.Name(name), annotation, value):
                    found[name] = FieldSource(module, annotation, value)
    return found


def _classes(definition: Definition) -> Iterator[Definition]:
    """Yields a class and its bases within the package."""
    yield definition
    module, node = definition
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        known = _definition(module, base.id) if isinstance(base, ast.Name) else None
        if known is not None and isinstance(known.node, ast.ClassDef):
            yield from _classes(known)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def _parameter(
    module: str, name: str, annotation: ast.expr | None, default: ast.expr | None
) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty
        if default is None
        else _literal(module, default),
        annotation=_type(module, annotation),
    )


def _literal(module: str, node: ast.expr) -> Any:
    """Returns a literal, or the constant of a name."""
    if isinstance(node, ast.Name):
        constant = _definition(module, node.id)
        if constant is not None and isinstance(constant.node, ast.Assign):
            return _literal(constant.module, constant.node.value)
    try:
        return ast.literal_eval(node)
    except ValueError:  # an expression
        return node


def _type(module: str, node: ast.expr | None) -> Any:
    """Returns the type that an annotation means, as far as it needs no import."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name):
            return PLAIN[name] if name in PLAIN else _named_type(module, name)
        case ast.BinOp(left=left, right=right):
            return Union[_type(module, left), _type(module, right)]  # noqa: UP007
        case ast.Subscript(ast.Name("Literal"), values):
            return Literal[ast.literal_eval(values)]
        case ast.Subscript(ast.Name(name), inner) if name in GENERIC:
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return GENERIC[name][tuple(_part(module, part) for part in parts)]
        case ast.Attribute():
            return FOREIGN.get(ast.unparse(node), Any)
    return Any


def _part(module: str, node: ast.expr) -> Any:
    """Returns a part of a generic type, which for a function is a list of types."""
    match node:
        case ast.Constant(value=value) if value is ...:
            return ...
        case ast.List(elts=elements):
            return [_type(module, element) for element in elements]
    return _type(module, node)


def _named_type(module: str, name: str) -> Any:
    definition = _definition(module, name)
    if definition is None:
        return Any
    if isinstance(definition.node, ast.Assign):
        return _type(definition.module, definition.node.value)
    if isinstance(definition.node, ast.ClassDef) and _is_dataclass(definition.node):
        return dataclasses.make_dataclass(name, ())
    return Any
