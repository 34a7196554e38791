"""Private parts of other packages: those that are listed exist, and no others are used.

A part is private if its name begins with an underscore.
"""

import argparse
import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import prompt_tuning
from prompt_tuning.core import private_parts
from prompt_tuning.core.private_parts import PRIVATE_PARTS, options_of, private_part

PACKAGE = Path(prompt_tuning.__file__).parent
DOCUMENTED = ("_replace", "_asdict", "_fields", "_exit", "_getframe")
"""Names of named tuples, `os` and `sys` that Python documents."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module of this package defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if isinstance(node.ctx, ast.Store) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the private names that a module reads or imports, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
            names += [getattr(node, "module", None) or ""]
            for name in ".".join(names).split("."):
                yield node.lineno, name


@pytest.mark.slow
def test_no_other_private_part_is_used():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = {name for tree in trees.values() for name in own_names(tree)}
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        for line, name in used_names(tree)
        if path != Path(private_parts.__file__)
        and is_private(name)
        and name not in own
        and name not in DOCUMENTED
    ]
    assert found == []


def foreign_parts(cls: type) -> set[str]:
    """Returns the private names that classes of other packages give a class."""
    foreign = [x for x in cls.__mro__ if not x.__module__.startswith(PACKAGE.name)]
    return {name for x in foreign for name in vars(x) if is_private(name)}


def written_names(tree: ast.ClassDef) -> set[str]:
    """Returns the names that a class defines, and those that it reads of anything."""
    attributes = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    return attributes | {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}


@pytest.mark.slow
def test_no_class_uses_or_replaces_a_private_part_of_its_base():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [x for x in tree.body if isinstance(x, ast.ClassDef) and x.bases]
        if not classes or path.parent.name == "lm_eval":
            continue  # lm-evaluation-harness is not installed for all tests
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        for x in classes:
            parts = foreign_parts(getattr(module, x.name)).difference(DOCUMENTED)
            found += [f"{path.name} {y}" for y in written_names(x) & parts]
    assert found == []


@pytest.mark.parametrize(
    "name", sorted(PRIVATE_PARTS.keys() - {"argparse.ArgumentParser._actions"})
)
def test_each_part_exists(name):
    assert private_part(name) is not None


def test_a_parser_tells_its_options():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--steps")
    assert [option.option_strings for option in options_of(parser)] == [["--steps"]]


def test_a_part_that_is_not_listed_is_refused():
    with pytest.raises(KeyError):
        private_part("gin.config._CONSTANTS")


def test_at_most_eight_are_used():
    assert len(PRIVATE_PARTS) <= 8
