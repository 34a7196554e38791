"""What of one optimiser's state goes on in another's.

Leaves are known by their place in the tree, as `jax.tree_util.keystr` writes it, for
that is what a checkpoint keeps of them:

    .inner_states[0].inner_state[1][0].mu['decoder/prompt/prompt']    a parameter's own
    .inner_states[0].inner_state[1][0].count                          beside such leaves
    .inner_states[0].inner_state[1][1].count                          a schedule's

A parameter's own leaves are found again by their names (`mu`), wherever the other
optimiser has them; those beside them say how many steps they average over, and go with
them. Whatever else there is counts the steps of a run and starts with it.
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

Places = Mapping[str, Any]
"""Arrays or `jax.ShapeDtypeStruct`s by their place in an optimiser's state."""


@dataclasses.dataclass(frozen=True)
class CarriedState:
    """State that goes on.

    Attributes:
      kept: the parameters whose own state goes on.
      counted: the parameters whose state now stands beside a step count that is not
        its own, because one group has one for all that it trains, and that count.
      values: what goes on, by its place in the new state; of a checkpoint in orbax's
        form it is read where it is put.
    """

    paths: tuple[str, ...] = ()
    shared_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)

    def insert_into(self, state: Any) -> Any:
        """A state with these values in their places."""

        def chosen(place: Any, leaf: Any) -> Any:
            found = self.values.get(jax.tree_util.keystr(place))
            return leaf if found is None else like(found, leaf)

        return jax.tree_util.tree_map_with_path(chosen, state)


class _Own(NamedTuple):
    """A leaf of one parameter: its place, the node that has it, its name there."""

    place: str
    node: str
    name: str


def carry_over(found: Places, state: Any, paths: Iterable[str]) -> CarriedState:
    """Finds what goes on of another optimiser's state.

    Args:
      found: the arrays of the other state, by place.
      state: the new one, a tree of arrays or `jax.ShapeDtypeStruct`s.
      paths: the parameters whose state may go on. One goes on as a whole, where the
        other state has leaves of the same names, shapes and dtypes for it.
    """
    wanted = named_leaves(state)
    kept: dict[str, list[_Own]] = {}
    values: dict[str, Leaf] = {}
    # The nodes that hold state that goes on, and for each where that comes from.
    nodes: dict[str, dict[str, str]] = {}
    for path in paths:
        mine, theirs = _own(wanted, path), _own(found, path)
        if not mine or _kinds(mine, wanted) != _kinds(theirs, found):
            continue
        kept[path] = mine
        for new, old in zip(mine, theirs, strict=True):
            values[new.place] = found[old.place]
            nodes.setdefault(new.node, {})[path] = old.node
    counted: dict[str, int] = {}
    for node, sources in nodes.items():
        beside = _beside(wanted, found, node, set(sources.values()))
        values |= beside
        count = _count(beside, node)
        for path in _owners(wanted, node):
            own = _count(found, sources[path]) if path in sources else 0
            if own != count:
                counted[path] = count
    return CarriedState(tuple(kept), counted, values)


def _own(leaves: Places, path: str) -> list[_Own]:
    """A parameter's own leaves, in their order."""
    ending = f"[{path!r}]"
    found = []
    for place in leaves:
        before, own, after = place.partition(ending)
        if own:
            node, _, name = before.rpartition(".")
            found.append(_Own(place, node, name + after))
    return found


def _owners(leaves: Places, node: str) -> set[str]:
    """The parameters of which a node has leaves."""
    own = re.compile(re.escape(node) + r"\.\w+\['([^']+)'\].*")
    return {match[1] for match in map(own.fullmatch, leaves) if match is not None}


def _kinds(own: list[_Own], leaves: Places) -> list[tuple]:
    return [(leaf.name, *kind(leaves[leaf.place])) for leaf in own]


def _beside(wanted: Places, found: Places, node: str, others: set[str]) -> Arrays:
    """What stands in a node beside parameters' own leaves, as the others have it.

    Where several have it, because their groups are one now, the largest: the one that
    has averaged longest.
    """
    beside = {}
    for place, leaf in wanted.items():
        start, _, name = place.rpartition(".")
        if start != node or not name.isidentifier():
            continue
        named = [found[f"{o}.{name}"] for o in sorted(others) if f"{o}.{name}" in found]
        same = [x for x in named if kind(x) == kind(leaf)]
        if same:
            beside[place] = np.asarray(functools.reduce(np.maximum, same))
    return beside


def _count(leaves: Places, node: str) -> int:
    """How many steps a node's leaves average over; 0 where nothing in it says."""
    return int(np.asarray(leaves.get(f"{node}.count", 0)))
