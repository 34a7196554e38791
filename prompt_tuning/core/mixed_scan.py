"""A scan over layers of different kinds, one repetition of their pattern at a time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from prompt_tuning.core.block_arrays import Blocks, is_block_arrays
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import LayerRun, kept_by, repetitions
from prompt_tuning.core.recomputation import checkpointed
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.save_policies import BLOCK_INPUT, named

Tree = TypeVar("Tree")
Index = Array | int
Kind = tuple[str, ...]


def scan_mixed(
    bodies: Mapping[Kind, Callable[..., tuple[Tree, Any]]],
    hidden: Tree,
    kinds: Sequence[Kind],
    parameters: Mapping[str, Blocks],
    others: Any,
    own: Mapping[str, Any],
    policy: Rematerialization,
) -> tuple[Tree, dict[str, Any]]:
    """Runs layers of different kinds one after another.

    The layers are divided into parts in which a pattern repeats; a loop runs over each
    part's repetitions, with one repetition's layers as its body. Weights are sliced
    from their stacks by index, inside the rematerialized function; slicing before it
    would copy them.

    Args:
      bodies: for each kind, `f(hidden, (one layer's parameters, one layer's others, one
        layer's own))`, which returns hidden states and a dict of trees, named like
        `own`, or an empty one.
      hidden: input of the first layer, a tree of arrays.
      kinds: kind of each layer: the names of its parts.
      parameters: parameters by path, stacked on the layers that have them; a part's
        paths begin with its name.
      others: tree of each layer's other inputs, stacked on all layers.
      own: trees of inputs that only layers with some mixers have, stacked on those, by
        the names in `kept_by`.
      policy: what is saved for the backward pass, the same for all layers.

    Returns:
      the output of the last layer, and the trees, stacked and named like `own`.

    Raises:
      InputError: if the policy treats layers differently.
    """
    every = sorted({part for kind in kinds for part in kind})
    if not policy.alike:
        varied = [name for name in every if any(name not in kind for kind in kinds)]
        raise InputError(
            "Rematerialization with skip_first, skip_last, ranges or every is for "
            "models whose layers are all alike, but this one mixes "
            f"{' and '.join(varied)}: leave these settings out"
        )

    def body_of(kind: Kind) -> Callable[..., tuple[Tree, Any]]:
        parts = {path: path.split("/")[0] for path in parameters}
        present = {
            path: part
            for path, part in parts.items()
            if part in kind or part not in every
        }

        def body(
            hidden: Tree, number: Index, ranks: Mapping[str, Index]
        ) -> tuple[Tree, Any]:
            layer = {
                path: _entry(parameters[path], ranks.get(part, number))
                for path, part in present.items()
            }
            preceding = {
                name: entries(own[name], ranks[name]) for name in kept_by(kind)
            }
            inputs = layer, entries(others, number), preceding
            return bodies[kind](named(hidden, BLOCK_INPUT), inputs)

        return body

    run = {kind: body_of(kind) for kind in bodies}
    leaves = jax.tree.leaves((parameters, own), is_leaf=is_block_arrays)
    parts = repetitions(kinds)
    if any(map(is_block_arrays, leaves)):
        parts = [LayerRun(i, (kind,), 1) for i, kind in enumerate(kinds)]
    outputs: dict[str, list[Any]] = defaultdict(list)
    for part in parts:
        hidden, collected = _run_part(run, hidden, kinds, part, policy)
        for name, trees in collected.items():
            outputs[name].append(trees)
    return hidden, {
        name: jax.tree.map(
            lambda *parts_of_stack: jnp.concatenate(parts_of_stack), *trees
        )
        for name, trees in outputs.items()
    }


def _run_part(run, hidden, kinds, part, policy):
    """Runs the repetitions of a pattern.

    Returns:
      the hidden states, and what the layers keep, stacked on the part's layers.
    """
    pattern, in_loop = part.pattern, part.count > 1
    preceding, repeated = _counts(kinds[: part.start]), _counts(pattern)

    def repetition(hidden, index):
        outputs = defaultdict(list)
        for place, kind in enumerate(pattern):
            number = part.start + index * len(pattern) + place
            within = _counts(pattern[:place])
            names = {*kind, *kept_by(kind)}
            ranks = {x: preceding[x] + index * repeated[x] + within[x] for x in names}
            body = checkpointed(run[kind], policy, in_scan=in_loop)
            hidden, output = body(hidden, number, ranks)
            for name, tree in output.items():
                outputs[name].append(tree)
        return hidden, {
            name: jax.tree.map(lambda *repeated: jnp.stack(repeated), *trees)
            for name, trees in outputs.items()
        }

    if not in_loop:
        return repetition(hidden, 0)
    hidden, outputs = jax.lax.scan(repetition, hidden, jnp.arange(part.count))
    # An array may be empty, which leaves no size open.
    return hidden, jax.tree.map(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), outputs
    )


def _counts(kinds: Sequence[Kind]) -> Counter[str]:
    """Counts the layers with each part, and those that keep each kind."""
    return Counter(part for kind in kinds for part in {*kind, *kept_by(kind)})


def _entry(stack: Blocks, index: Index) -> Array:
    if isinstance(index, int):
        return stack[index]
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def entries(tree: Any, index: Index) -> Any:
    """Returns one layer's entries in a tree of stacks."""
    return jax.tree.map(lambda x: _entry(x, index), tree, is_leaf=is_block_arrays)
