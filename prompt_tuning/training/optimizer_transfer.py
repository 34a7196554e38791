"""Carry optimizer state over from another run.

Leaves are identified by their key path in the state's tree, as written by
`jax.tree_util.keystr`, because checkpoints store these key paths:

    .inner_states[0].inner_state[1][0].mu['decoder/prompt/prompt']  a parameter's leaf
    .inner_states[0].inner_state[1][0].count                        its node's count
    .inner_states[0].inner_state[1][1].count                        a schedule's count

A parameter's leaves are matched by name (`mu`), wherever the other optimizer's tree has
them. Leaves next to them in the same node, e.g. the number of steps that a moment
averages over, are carried over too. All other leaves count the steps of a run and start
anew.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from prompt_tuning.adapters.adapter import Arrays
from prompt_tuning.checkpoints.run_store.checkpoint_files import kind, named_leaves
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf, like

StateLeaves = Mapping[str, Any]
"""Arrays or `jax.ShapeDtypeStruct`s by their key path in an optimizer's state."""


@dataclasses.dataclass(frozen=True)
class CarriedState:
    """Optimizer state carried over from another run.

    Attributes:
      paths: parameters that keep their state.
      shared_counts: step counts by parameter, for parameters with a count that is not
        their own, because their group has a single count.
      values: carried values by key path in the new state. Values of a checkpoint in
        Orbax's format are read when inserted.
    """

    paths: tuple[str, ...] = ()
    shared_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)

    def insert_into(self, state: Any) -> Any:
        """Returns a state with the carried values."""

        def choose(key_path: Any, leaf: Any) -> Any:
            value = self.values.get(jax.tree_util.keystr(key_path))
            return leaf if value is None else like(value, leaf)

        return jax.tree_util.tree_map_with_path(choose, state)


class _ParameterLeaf(NamedTuple):
    """A leaf of one parameter: its key path, also split into a node and a name."""

    key_path: str
    node: str
    name: str


def carry_over(
    other_leaves: StateLeaves, state: Any, paths: Iterable[str]
) -> CarriedState:
    """Finds the part of another optimizer's state that can be carried over.

    Args:
      other_leaves: arrays of the other state by key path.
      state: the new state, a tree of arrays or `jax.ShapeDtypeStruct`s.
      paths: candidate parameters. A parameter's state is carried over as a whole, if
        the other state has leaves with the same names, shapes and dtypes for it.
    """
    new_leaves = named_leaves(state)
    carried: dict[str, list[_ParameterLeaf]] = {}
    values: dict[str, Leaf] = {}
    # For each node of the new state: the node that each parameter's leaves come from.
    sources_of_nodes: dict[str, dict[str, str]] = {}
    for path in paths:
        new = _parameter_leaves(new_leaves, path)
        old = _parameter_leaves(other_leaves, path)
        if not new or _kinds(new, new_leaves) != _kinds(old, other_leaves):
            continue
        carried[path] = new
        for target, source in zip(new, old, strict=True):
            values[target.key_path] = other_leaves[source.key_path]
            sources_of_nodes.setdefault(target.node, {})[path] = source.node
    shared_counts: dict[str, int] = {}
    for node, sources in sources_of_nodes.items():
        neighbors = _neighbors(new_leaves, other_leaves, node, set(sources.values()))
        values |= neighbors
        # A count that differs from a parameter's own is reported to the user.
        count = _count(neighbors, node)
        for path in _parameters_in(new_leaves, node):
            own_count = _count(other_leaves, sources[path]) if path in sources else 0
            if own_count != count:
                shared_counts[path] = count
    return CarriedState(tuple(carried), shared_counts, values)


def _parameter_leaves(leaves: StateLeaves, path: str) -> list[_ParameterLeaf]:
    key = f"[{path!r}]"
    matches = []
    for key_path in leaves:
        # `NODE.mu['PATH']` or, with a tree below it, `NODE.mu['PATH'].v_row`
        prefix, matched, after = key_path.partition(key)
        if matched:
            node, _, name = prefix.rpartition(".")
            matches.append(_ParameterLeaf(key_path, node, name + after))
    return matches


def _parameters_in(leaves: StateLeaves, node: str) -> set[str]:
    leaf = re.compile(re.escape(node) + r"\.\w+\['([^']+)'\].*")
    return {match[1] for match in map(leaf.fullmatch, leaves) if match is not None}


def _kinds(selected: list[_ParameterLeaf], leaves: StateLeaves) -> list[tuple]:
    return [(leaf.name, *kind(leaves[leaf.key_path])) for leaf in selected]


def _neighbors(
    new_leaves: StateLeaves, other_leaves: StateLeaves, node: str, sources: set[str]
) -> Arrays:
    """Returns the other state's values for a node's leaves that belong to no parameter.

    If the parameters come from several nodes, because their groups were merged, the
    maximum is taken: the count of the node that has averaged longest.
    """
    neighbors = {}
    for key_path, leaf in new_leaves.items():
        start, _, name = key_path.rpartition(".")
        if start != node or not name.isidentifier():
            continue
        candidates = [
            other_leaves[f"{source}.{name}"]
            for source in sorted(sources)
            if f"{source}.{name}" in other_leaves
        ]
        same_kind = [x for x in candidates if kind(x) == kind(leaf)]
        if same_kind:
            neighbors[key_path] = np.asarray(functools.reduce(np.maximum, same_kind))
    return neighbors


def _count(leaves: StateLeaves, node: str) -> int:
    """Returns the number of steps that a node averages over; 0 without a count."""
    return int(np.asarray(leaves.get(f"{node}.count", 0)))
