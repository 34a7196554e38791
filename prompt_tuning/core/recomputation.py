"""Makes a backward pass recompute what a `Rematerialization` does not save."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.save_policies import (
    ALL_BUT_WEIGHTS,
    ATTENTION,
    BLOCK_INPUT,
    MEMORY,
    PINNED,
    SUMS,
    SavePolicy,
    named,
)

Tree = TypeVar("Tree")


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
