"""Scan over blocks, in segments that are rematerialized together."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from prompt_tuning.core.block_arrays import Blocks, is_block_arrays
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.recomputation import checkpointed
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.save_policies import BLOCK_INPUT, named, recorded_names

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Body = Callable[[Carry, Any], tuple[Carry, Any]]


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
