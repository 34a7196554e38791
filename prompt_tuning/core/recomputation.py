"""Makes a backward pass recompute what a `Rematerialization` does not save.

A `SavePolicy` chooses the named activations and products that are saved.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.rematerialization import Rematerialization

BLOCK_INPUT = "block_input"
PINNED = "pinned_host"
ATTENTION = "attention"
MEMORY = "memory"
"""Name of what recurrent mixers compute: their outputs, and memories of chunks."""

# Sums over devices: recomputing one would repeat the communication.
SUMS = frozenset({"psum", "psum_invariant", "psum2", "reduce_scatter"})
# Saved in a block that is not rematerialized: outputs of products, of sums over devices
# and of random numbers. A dropout mask is the output of a comparison, one byte each.
EXPENSIVE = SUMS | {"dot_general", "exp", "ge"}

Tree = TypeVar("Tree")

_offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[BLOCK_INPUT],
    offload_src="device",
    offload_dst=PINNED,
)
_seen_names: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "seen names", default=None
)


def named(x: Tree, name: str) -> Tree:
    """Names an activation, so that the policy "names" can save it."""
    seen = _seen_names.get()
    if seen is not None:
        seen.add(name)
    return checkpoint_name(x, name)


@contextlib.contextmanager
def recorded_names() -> Iterator[set[str]]:
    """Collects the names that activations are given in the context."""
    seen: set[str] = set()
    token = _seen_names.set(seen)
    try:
        yield seen
    finally:
        _seen_names.reset(token)


@dataclasses.dataclass(frozen=True)
class SavePolicy:
    """A `jax.checkpoint` policy that saves what it lists and nothing else.

    So it never saves `all_gather`, the slice of a stack of weights, or casts of either.

    Attributes:
      primitives: primitives that have their outputs saved.
      names: names of activations to save.
      projections: whether to save outputs of projections.
      offload: whether to offload the block's input.
    """

    primitives: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    projections: bool = False
    offload: bool = False

    def __call__(self, primitive: Any, *inputs: Any, **parameters: Any) -> Any:
        """Returns whether, or where, an output of a primitive is saved."""
        if primitive.name == "name":
            name = parameters["name"]
            if name == BLOCK_INPUT and self.offload:
                return _offloaded(primitive, *inputs, **parameters)
            return name in self.names
        if self.projections and primitive.name == "dot_general":
            # A product with batch axes makes attention scores, one for each pair of
            # positions; projections have no batch axes.
            _, batch_axes = parameters["dimension_numbers"]
            return not any(batch_axes)
        return primitive.name in self.primitives


ALL_BUT_WEIGHTS = SavePolicy(EXPENSIVE, names=frozenset({MEMORY}))
"""Saves everything that is expensive to compute, and no gathered weight."""


def _save_policy(settings: Rematerialization) -> SavePolicy:
    policy = {
        "none": ALL_BUT_WEIGHTS,
        "dots": SavePolicy(SUMS, frozenset({MEMORY}), projections=True),
        "attention": SavePolicy(names=frozenset({ATTENTION, MEMORY})),
        "names": SavePolicy(names=frozenset(settings.names)),
        "nothing": SavePolicy(),
    }[settings.policy]
    return dataclasses.replace(policy, offload=settings.offload)


def rematerialized(
    function: Callable[..., Tree],
    policy: Rematerialization | Callable[..., Any],
    *,
    in_scan: bool = False,
) -> Callable[..., Tree]:
    """Makes the backward pass of a function recompute what a policy does not save.

    Arguments, keyword arguments and outputs are any trees. Their arrays are traced; all
    other leaves (strings, Python numbers, functions) are passed through unchanged.
    Random keys are ordinary arguments, so the same dropout masks are drawn again.

    With `Rematerialization.offload`, floating-point arrays among the arguments are kept
    in the host's pinned memory until the backward pass. To keep weights on the device,
    bind them to the function (as a module's are) instead of passing them.

    Args:
      function: any function, module or method.
      policy: what is saved, ignoring `skip_first` and `skip_last`; or a policy of
        `jax.checkpoint_policies`.
      in_scan: whether the function is the body of a `jax.lax.scan` with more than one
        step (a scan of one step compiles to no loop). There the compiler cannot merge
        the two computations and need not be prevented from it.

    Raises:
      InputError: if the arguments are to be offloaded, and the device cannot read
        pinned memory, or (when called) none of them is a floating-point array.
    """
    if not isinstance(policy, Rematerialization) or not policy.offload:
        return checkpointed(function, policy, in_scan=in_scan)
    _check_pinned_memory()

    def on_named(*arguments: Any, **keywords: Any) -> Tree:
        arrays, static = _separate_arrays((arguments, keywords))
        floating = [jnp.issubdtype(array.dtype, jnp.inexact) for array in arrays]
        if not any(floating):
            raise InputError(
                "Rematerialization.offload keeps the floating-point arrays among the "
                f"arguments of {shown(function)} in host memory, but none was given: "
                "pass the activations as arguments, or leave out offload"
            )
        arguments, keywords = static.restore(
            [
                named(array, BLOCK_INPUT) if differentiable else array
                for array, differentiable in zip(arrays, floating, strict=True)
            ]
        )
        return function(*arguments, **keywords)

    return checkpointed(on_named, policy, in_scan=in_scan)


def _check_pinned_memory() -> None:
    device = jax.devices()[0]
    if all(memory.kind != PINNED for memory in device.addressable_memories()):
        raise InputError(
            f"Rematerialization.offload needs pinned host memory, which {device} does "
            "not have: set it to False"
        )


def checkpointed(
    function: Callable[..., Tree],
    policy: Rematerialization | Callable[..., Any],
    *,
    in_scan: bool,
) -> Callable[..., Tree]:
    """Implements `rematerialized` for a function that names its activations."""
    save = _save_policy(policy) if isinstance(policy, Rematerialization) else policy

    def call(*arguments: Any, **keywords: Any) -> Tree:
        inputs, static = _separate_arrays((arguments, keywords))
        static_outputs: list[_StaticLeaves] = []

        def on_arrays(arrays: list[Any]) -> list[Any]:
            arguments, keywords = static.restore(arrays)
            outputs, rest = _separate_arrays(function(*arguments, **keywords))
            static_outputs[:] = [rest]
            return outputs

        checkpointed = jax.checkpoint(on_arrays, policy=save, prevent_cse=not in_scan)
        outputs = checkpointed(inputs)
        return static_outputs[0].restore(outputs)

    return call


class _StaticLeaves(NamedTuple):
    """A tree without its arrays.

    Attributes:
      structure: structure of the tree.
      leaves: leaves of the tree, `None` instead of arrays.
      array_indices: indices of the arrays among the leaves.
    """

    structure: Any
    leaves: list[Any]
    array_indices: list[int]

    def restore(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with its arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.array_indices, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def _separate_arrays(tree: Any) -> tuple[list[Any], _StaticLeaves]:
    leaves, structure = jax.tree.flatten(tree)
    kinds = (jax.Array, np.ndarray, np.generic)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    arrays = [leaves[i] for i in places]
    static = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    return arrays, _StaticLeaves(structure, static, places)
