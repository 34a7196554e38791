"""Limits on the structure of the package."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prompt_tuning"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text()) for file in FILES}


def module_of(file: Path) -> str:
    """Returns the dotted name of a file."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported_modules(file: Path) -> set[str]:
    """Returns the package's modules that a file imports."""
    modules = set()
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules.add(name if name in MODULES else node.module)
    return {name for name in modules if name in MODULES}


def room_of(module: str, depth: int) -> str:
    """Returns the folder of a module, at most `depth` levels below the package.

    A file of the package itself is a room, too.
    """
    file = MODULES[module]
    folder = file.parent.relative_to(PACKAGE).parts[:depth]
    return "/".join(folder) or file.name


def test_the_package_has_two_files_beside_its_folders():
    files = {file.name for file in FILES if file.parent == PACKAGE}
    assert files == {"__init__.py", "__main__.py"}


def test_the_package_has_at_most_27_rooms():
    assert len({room_of(module, 1) for module in MODULES}) <= 27


@pytest.mark.parametrize("depth", [1, 2])
def test_folders_import_downwards_only(depth):
    graph = defaultdict(set)
    for module, file in MODULES.items():
        importer = room_of(module, depth)
        for other in imported_modules(file):
            room = room_of(other, depth)
            # A folder and the folders in it are one subject.
            nested = importer.startswith(room) or room.startswith(importer)
            if not nested:
                graph[importer].add(room)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as problem:
        pytest.fail(f"folders import each other: {' -> '.join(problem.args[1])}")


def test_files_do_not_import_each_other():
    graph = {
        module: imported_modules(file) - {module} for module, file in MODULES.items()
    }
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as problem:
        pytest.fail(f"files import each other: {' -> '.join(problem.args[1])}")


def test_file_names_are_unique():
    names = Counter(file.name for file in FILES if file.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_class_names_are_unique():
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def function_lengths() -> dict[str, int]:
    """Yields each function and its number of lines, without its docstring."""
    lengths = {}
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documented = (ast.get_docstring(node) or "").count("\n")
                lines = (node.end_lineno or 0) - node.lineno + 1 - documented
                lengths[f"{file.relative_to(ROOT)}:{node.name}"] = lines
    return lengths


def test_files_and_functions_are_short():
    long_files = {
        str(file.relative_to(ROOT)): lines
        for file in FILES
        if (lines := file.read_text().count("\n")) > 400
    }
    assert long_files == {}
    lengths = function_lengths()
    assert np.percentile(list(lengths.values()), 90) <= 25
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, prompt_tuning as pt; pt.SoftPrompt; "
        "print([m for m in ('jax', 'numpy', 'gin', 'h5py') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.stdout.strip() == "[]", shown.stderr
