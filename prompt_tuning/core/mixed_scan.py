"""A scan over layers of several kinds, one repetition of their pattern at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from prompt_tuning.core.block_arrays import Blocks, is_block_arrays
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import LayerRun, repetitions
from prompt_tuning.core.rematerialization import Rematerialization, checkpointed
from prompt_tuning.core.save_policies import BLOCK_INPUT, named

Tree = TypeVar("Tree")
Index = Array | int


def scan_mixed(
    bodies: Mapping[str, Callable[..., tuple[Tree, Any]]],
    hidden: Tree,
    kinds: Sequence[str],
    parameters: Mapping[str, Blocks],
    others: Any,
    own: Mapping[str, Any],
    policy: Rematerialization,
) -> tuple[Tree, dict[str, Any]]:
    """Runs layers of different kinds one after another.

    A loop runs over the repetitions of each part of the layers, and its body has the
    layers of one repetition. Weights are sliced from their stacks by index, inside the
    rematerialized function: slicing beforehand would copy them.

    Args:
      bodies: for each kind, `f(hidden, (one layer's parameters, one layer's others, one
        layer's own))`, which returns hidden states and a tree.
      hidden: input of the first layer, a tree of arrays.
      kinds: kind of each layer.
      parameters: parameters by path, stacked on the layers that have them; the path of
        one that only some layers have begins with their kind.
      others: tree of each layer's other inputs, stacked on all layers.
      own: for each kind, a tree of inputs that are stacked on its layers.
      policy: what is saved for the backward pass, the same for all layers.

    Returns:
      the output of the last layer, and for each kind the trees, stacked on its layers.

    Raises:
      InputError: if the policy treats layers differently.
    """
    if not policy.alike:
        raise InputError(
            "Rematerialization with skip_first, skip_last, ranges or every is for "
            "models whose layers are all alike, but this one mixes "
            f"{' and '.join(sorted(set(kinds)))}: leave these settings out"
        )

    def body_of(kind: str) -> Callable[..., tuple[Tree, Any]]:
        present = {
            path: (stack, path.split("/")[0] == kind)
            for path, stack in parameters.items()
            if path.split("/")[0] not in bodies or path.split("/")[0] == kind
        }

        def body(hidden: Tree, number: Index, rank: Index) -> tuple[Tree, Any]:
            layer = {
                path: _entry(stack, rank if is_own else number)
                for path, (stack, is_own) in present.items()
            }
            inputs = _entries(others, number), _entries(own[kind], rank)
            return bodies[kind](named(hidden, BLOCK_INPUT), (layer, *inputs))

        return body

    run = {kind: body_of(kind) for kind in bodies}
    leaves = jax.tree.leaves((parameters, own), is_leaf=is_block_arrays)
    parts = repetitions(kinds)
    if any(map(is_block_arrays, leaves)):
        parts = [LayerRun(i, (kind,), 1) for i, kind in enumerate(kinds)]
    outputs: dict[str, list[Any]] = {kind: [] for kind in bodies}
    for part in parts:
        hidden, collected = _run_part(run, hidden, kinds, part, policy)
        for kind, trees in collected.items():
            outputs[kind].append(trees)
    return hidden, {
        kind: jax.tree.map(lambda *each: jnp.concatenate(each), *trees)
        for kind, trees in outputs.items()
    }


def _run_part(run, hidden, kinds, part, policy):
    """Runs the repetitions of a pattern.

    Returns:
      the hidden states, and for each kind its trees, stacked on the part's layers.
    """
    pattern, in_loop = part.pattern, part.count > 1
    ranks = {kind: kinds[: part.start].count(kind) for kind in set(pattern)}

    def repetition(hidden, index):
        outputs = {kind: [] for kind in set(pattern)}
        for place, kind in enumerate(pattern):
            number = part.start + index * len(pattern) + place
            before = index * pattern.count(kind) + len(outputs[kind])
            body = checkpointed(run[kind], policy, in_scan=in_loop)
            hidden, output = body(hidden, number, ranks[kind] + before)
            outputs[kind].append(output)
        return hidden, {
            kind: jax.tree.map(lambda *each: jnp.stack(each), *trees)
            for kind, trees in outputs.items()
        }

    if not in_loop:
        return repetition(hidden, 0)
    hidden, outputs = jax.lax.scan(repetition, hidden, jnp.arange(part.count))
    return hidden, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def _entry(stack: Blocks, index: Index) -> Array:
    """Returns one layer's entry of a stack."""
    if isinstance(index, int):
        return stack[index]
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _entries(tree: Any, index: Index) -> Any:
    return jax.tree.map(lambda x: _entry(x, index), tree, is_leaf=is_block_arrays)
