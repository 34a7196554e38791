"""Scans over blocks, in parts that are rematerialized together.

`scan_blocks` is for blocks that are all alike, and `scan_mixed` for layers of different
kinds, of which it runs one repetition of their pattern at a time.
"""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from prompt_tuning.core.block_arrays import Blocks, is_block_arrays
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import LayerRun, kept_by, repetitions
from prompt_tuning.core.recomputation import (
    BLOCK_INPUT,
    checkpointed,
    named,
    recorded_names,
)
from prompt_tuning.core.rematerialization import Rematerialization

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Body = Callable[[Carry, Any], tuple[Carry, Any]]
Index = Array | int
Kind = tuple[str, ...]


def scan_blocks(
    body: Body,
    hidden: Tree,
    parameters: Mapping[str, Blocks],
    others: Any,
    policy: Rematerialization,
    *,
    gathers: bool = False,
) -> tuple[Tree, Any]:
    """`jax.lax.scan` over blocks, in parts where their policies differ.

    Blocks given as `BlockArrays` run one by one instead, without a backward pass.

    Args:
      body: `f(hidden, (one block's parameters, one block's others))`, which returns
        hidden states and a tree.
      hidden: input of the first block, a tree of arrays.
      parameters: parameters of all blocks, by path, stacked on `L` or `BlockArrays`.
      others: tree of each block's other inputs, in the same two forms.
      policy: what is saved for the backward pass.
      gathers: whether blocks gather their weights from other devices.

    Returns:
      the output of the last block, and the trees, stacked on `L`.

    Raises:
      InputError: if `policy` names an activation that no block has.
    """
    count = len(next(iter(parameters.values())))
    layers = parameters, others
    if any(map(is_block_arrays, jax.tree.leaves(layers, is_leaf=is_block_arrays))):
        return _run_each(body, hidden, layers, count)
    with _check_names(policy):
        if not policy.alike:
            return _scan_in_parts(body, hidden, parameters, others, policy)

        def named_body(hidden, layer):
            return body(named(hidden, BLOCK_INPUT), layer)

        if policy.active or gathers:
            named_body = checkpointed(named_body, policy, in_scan=count > 1)
        return jax.lax.scan(named_body, hidden, layers)


def _run_each(body: Body, hidden: Tree, layers: Any, count: int) -> tuple[Tree, Any]:
    outputs = []
    for index in range(count):
        layer = jax.tree.map(lambda x, i=index: x[i], layers, is_leaf=is_block_arrays)
        hidden, output = body(hidden, layer)
        outputs.append(output)
    return hidden, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def _scan_in_parts(body, hidden, parameters, others, policy):
    """Scans over ranges of blocks, one after another.

    Each scan slices its blocks' parameters by index from the stack of all blocks,
    inside the rematerialized function; slicing before it would make a copy.
    """

    def indexed_body(hidden, layer):
        index, block_others = layer
        block = {
            path: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
            for path, stack in parameters.items()
        }
        return body(hidden, (block, block_others))

    outputs = []  # of each part, trees stacked on its blocks
    for start, stop, part_policy in policy.parts(len(next(iter(parameters.values())))):
        whole = start + (stop - start) // part_policy.every * part_policy.every
        # The blocks that remain after whole segments form one more segment.
        for first, last in ((start, whole), (whole, stop)):
            if first < last:
                # The other inputs are small, so they are sliced before the scan.
                part = jax.tree.map(lambda x, a=first, b=last: x[a:b], others)
                layers = jnp.arange(first, last), part
                hidden, output = _scan_segments(
                    indexed_body,
                    hidden,
                    layers,
                    part_policy,
                    min(part_policy.every, last - first),
                )
                outputs.append(output)
    return hidden, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _scan_segments(
    body: Body, hidden: Tree, layers: Any, policy: Rematerialization, every: int
) -> tuple[Tree, Any]:
    """Scans over blocks, and rematerializes each `every` of them together."""
    count = len(jax.tree.leaves(layers)[0])
    if every > 1:
        # The backward pass of a segment slices (or gathers) each block's weights again.
        body = functools.partial(
            jax.lax.scan, checkpointed(body, Rematerialization(), in_scan=True)
        )
        layers = jax.tree.map(
            lambda x: x.reshape(count // every, every, *x.shape[1:]), layers
        )

    def named_body(hidden, layer):
        return body(named(hidden, BLOCK_INPUT), layer)

    step = checkpointed(named_body, policy, in_scan=count > every)
    hidden, outputs = jax.lax.scan(step, hidden, layers)
    if every > 1:
        outputs = jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), outputs)
    return hidden, outputs


@contextlib.contextmanager
def _check_names(policy: Rematerialization) -> Iterator[None]:
    """Checks, once blocks are traced, that the activations to save exist."""
    with recorded_names() as seen:
        yield
    policies = [policy, *(part.rematerialization for part in policy.ranges)]
    missing = sorted(
        {name for policy_of_part in policies for name in policy_of_part.names} - seen
    )
    if missing:
        raise InputError(
            f"Rematerialization.names has {shown(missing[0])}, but the blocks name "
            f"{', '.join(sorted(seen))}; name your own activations with "
            "rematerialization.named(x, name)"
        )


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
