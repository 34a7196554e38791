"""Checks the types and array shapes of every call into the package while tests run.

jaxtyping's own import hook wraps each function in three others that check its arguments
twice. This one wraps a function once, and makes a scope for the names of axes only
where an annotation has some. So checked tests take little longer than others.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, ForwardRef, Literal, get_args, get_origin

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, PyTree, TypeCheckError, jaxtyped

NAME = "_check_types"
SCOPE = jaxtyped("context")
with_checks = beartype(conf=BeartypeConf(violation_type=TypeCheckError))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    inner = hint if isinstance(hint, list) else get_args(hint)
    if get_origin(hint) is not Literal:
        yield from itertools.chain.from_iterable(map(_parts, inner))


def _has_axes(hint: Any) -> bool:
    return any(
        isinstance(part, type) and issubclass(part, AbstractArray | PyTree)
        for part in _parts(hint)
    )


def _is_defined(hint: Any) -> bool:
    return not any(isinstance(part, str | ForwardRef) for part in _parts(hint))


def _check_defined(function: FunctionType) -> Any:
    """Checks all but the types that only a type checker imports."""
    hints = function.__annotations__
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__annotations__ = {x: hint for x, hint in hints.items() if _is_defined(hint)}
    checked = with_checks(copy)
    return function if checked is copy else functools.update_wrapper(checked, function)


def _show(checked: Any, function: Any) -> Any:
    """Gives a wrapper the parameters of its function, of which gin writes defaults."""
    if checked is not function:
        checked.__signature__ = inspect.signature(function)
    return checked


def check(made: Any) -> Any:
    """Returns a function, or a dataclass, whose calls are checked."""
    if isinstance(made, type):
        start = vars(made).get("__init__")
        is_made = start is not None and not hasattr(start, "__wrapped__")
        if is_made and dataclasses.is_dataclass(made):
            made.__init__ = check(start)
        return made
    given = dict(made.__annotations__)
    hints = given.values()
    checked = (
        with_checks(made) if all(map(_is_defined, hints)) else _check_defined(made)
    )
    # beartype writes equal unions in one order, and messages follow the given one.
    made.__annotations__ = checked.__annotations__ = given
    if not any(map(_has_axes, hints)):
        return _show(checked, made)

    @functools.wraps(made)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        with SCOPE:
            return checked(*args, **kwargs)

    return _show(in_scope, made)


class _Decorator(ast.NodeTransformer):
    """Decorates functions first, and classes after their other decorators."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit(node, len(node.decorator_list))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit(node, 0)

    def _visit(self, node: ast.FunctionDef | ast.ClassDef, index: int) -> ast.AST:
        if any(ast.unparse(x).endswith("no_type_check") for x in node.decorator_list):
            return node
        name = ast.copy_location(ast.Name(NAME, ast.Load()), node)
        node.decorator_list.insert(index, name)
        return self.generic_visit(node)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Decorator().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[NAME] = check
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "prompt_tuning":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Checks the modules of the package, none of which may be imported before."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        assert "prompt_tuning" not in sys.modules
        sys.meta_path.insert(0, _Finder())
