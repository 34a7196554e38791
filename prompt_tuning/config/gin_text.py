"""Writes settings given from Python as gin bindings.

A run that Python configures goes through the same bindings as one that gin files
configure, so that its directory is a run directory like any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.core.errors import InputError, shown


def gin_bindings(root: Configured, factories: frozenset[str]) -> list[str]:
    """Writes settings as bindings, such as `SoftPrompt.length = 20`.

    A factory that occurs more than once gets a scope for each use, as in
    `train/DataSource.files` and `evaluation/DataSource.files`; parameters that all uses
    share are bound once, without a scope.

    Args:
      root: settings, usually of `Run`.
      factories: names that the run itself calls, with a key and the vocabulary (prompt
        classes); references to all others are called by gin.
    """
    uses: dict[str, list[Configured]] = {}
    for node in _walk(root):
        uses.setdefault(node.name, []).append(node)
    bindings: dict[str, str] = {}

    def reference(node: Configured, path: str) -> str:
        several = len(uses[node.name]) > 1
        scope = f"{node.scope or path}/" if several else ""
        for name, value in node:
            inner = f"{path}_{name}" if path else name
            text = literal(value, f"{node.name}.{name}", inner)
            shared = several and _is_shared(name, value, uses[node.name])
            key = f"{'' if shared else scope}{node.name}.{name}"
            bindings[key] = f"{key} = {text}"
        return f"@{scope}{node.name}" + ("" if node.name in factories else "()")

    def literal(value: Any, label: str, path: str) -> str:
        if isinstance(value, Configured):
            return reference(value, path)
        if isinstance(value, Mapping):
            items = (
                f"{literal(k, label, path)}: {literal(v, label, f'{path}_{i}')}"
                for i, (k, v) in enumerate(value.items())
            )
            return f"{{{', '.join(items)}}}"
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            items = [literal(x, label, f"{path}_{i}") for i, x in enumerate(value)]
            if isinstance(value, tuple):
                return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            return f"[{', '.join(items)}]"
        if isinstance(value, Path):
            return repr(str(value))
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        raise InputError(
            f"{label} is {shown(value)}, which a config cannot hold: expected a "
            "number, a text, None, or a list or settings of these"
        )

    reference(root, "")
    return list(bindings.values())


def _is_shared(name: str, value: Any, nodes: Sequence[Configured]) -> bool:
    return not any(_walk(value)) and all(
        name in node.parameters and node.parameters[name] == value for node in nodes
    )


def _walk(value: Any) -> Iterator[Configured]:
    if isinstance(value, Configured):
        yield value
        for _, inner in value:
            yield from _walk(inner)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _walk(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from _walk(inner)
