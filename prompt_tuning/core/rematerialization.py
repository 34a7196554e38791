"""Rematerialization: which activations of the blocks are saved for the backward pass.

An activation is either saved, on the device or in host memory, or recomputed from what
is saved (Chen et al. 2016). A block's *outer* activation is its input, its *inner*
activations are all others: the outer one can be offloaded to host memory, the inner
ones can be recomputed, or both.

Under every policy, weights that a block gathers from other devices or slices from the
stack of all blocks are gathered and sliced again: saving them for the backward pass
would make a second copy of the model.
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
from jaxtyping import Array

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields

POLICIES = ("none", "dots", "attention", "names", "nothing")
BLOCK_INPUT = "block_input"
PINNED = "pinned_host"
ATTENTION = "attention"

# Sums over devices: recomputing one would repeat the communication.
SUMS = frozenset({"psum", "psum_invariant", "psum2", "reduce_scatter"})
# Saved in a block that is not rematerialized: outputs of products, of sums over devices
# and of random numbers. A dropout mask is the output of a comparison, one byte each.
EXPENSIVE = SUMS | {"dot_general", "exp", "ge"}

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Body = Callable[[Carry, Any], tuple[Carry, Any]]

_offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[BLOCK_INPUT],
    offload_src="device",
    offload_dst=PINNED,
)
_seen_names: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "seen names", default=None
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """Which activations of a stack are saved for the backward pass, and where.

    Attributes:
      policy: which inner activations are saved, while the others are recomputed: "none"
        recomputes nothing; "dots" saves the output of each projection; "attention"
        saves the output of attention before its output projection; "names" saves the
        activations listed in `names`; "nothing" saves none, so that each block runs
        twice.
      names: names for the policy "names": the blocks name "query", "keys", "values",
        "attention", "gate" and "up", and your code may name others with `named`.
      skip_first: number of blocks at the start that recompute only element-wise
        operations and offload nothing.
      skip_last: number of such blocks at the end.
      offload: whether each block's input is moved to the host's pinned memory, and back
        when the backward pass reaches the block.

    Raises:
      InputError: if the fields contradict each other.
    """

    policy: str = "none"
    names: Sequence[str] = ()
    skip_first: int = 0
    skip_last: int = 0
    offload: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.policy not in POLICIES:
            listed = ", ".join(map(repr, POLICIES))
            raise InputError(
                f"Rematerialization.policy is {shown(self.policy)}, expected one of "
                f"{listed}"
            )
        if isinstance(self.names, str) or not isinstance(self.names, Sequence):
            raise InputError(
                f"Rematerialization.names is {shown(self.names)}, expected a list of "
                "strings"
            )
        # Part of a model's structure, which is a key of compiled programs: hashable.
        object.__setattr__(self, "names", tuple(self.names))
        if bool(self.names) != (self.policy == "names"):
            raise InputError(
                f"Rematerialization.names is {self.names} and policy "
                f"{shown(self.policy)}: names are for policy 'names', which needs some"
            )
        self._check_skips()

    def _check_skips(self) -> None:
        for name in ("skip_first", "skip_last"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"Rematerialization.{name} is {getattr(self, name)}, expected a "
                    "number of blocks, 0 or more"
                )
        if self.skipped_blocks and not self.active:
            raise InputError(
                f"Rematerialization skips {self.skip_first} blocks at the start and "
                f"{self.skip_last} at the end, but its policy is 'none' and nothing is "
                "offloaded: choose a policy, or skip no block"
            )

    @property
    def active(self) -> bool:
        """Whether anything is recomputed or offloaded."""
        return self.policy != "none" or self.offload

    @property
    def skipped_blocks(self) -> int:
        """Number of blocks that are skipped."""
        return self.skip_first + self.skip_last

    def without_skips(self) -> "Rematerialization":
        """Returns the same policy for all blocks, with none skipped."""
        return dataclasses.replace(self, skip_first=0, skip_last=0)

    def check_layers(self, stack: str, layers: int) -> None:
        """Checks that some block is not skipped.

        Args:
          stack: "encoder" or "decoder", for the message.
          layers: number of its blocks.

        Raises:
          InputError: if all blocks are skipped.
        """
        if self.skipped_blocks and self.skipped_blocks >= layers:
            raise InputError(
                f"Rematerialization skips {self.skip_first} + {self.skip_last} blocks "
                f"of a {stack} that has {layers}: skip fewer, or choose the policy "
                "'none'"
            )


def named(x: Tree, name: str) -> Tree:
    """Names an activation, so that the policy "names" can save it."""
    seen = _seen_names.get()
    if seen is not None:
        seen.add(name)
    return checkpoint_name(x, name)


@dataclasses.dataclass(frozen=True)
class _SavePolicy:
    """A `jax.checkpoint` policy that lists what is saved and refuses everything else.

    Everything else includes `all_gather`, the slice of a stack of weights, and casts of
    either.

    Attributes:
      primitives: names of primitives whose outputs are saved.
      names: names of activations that are saved.
      projections: whether outputs of projections are saved.
      offload: whether the block's input is offloaded.
    """

    primitives: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    projections: bool = False
    offload: bool = False

    def __call__(self, primitive: Any, *inputs: Any, **parameters: Any) -> Any:
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


ALL_BUT_WEIGHTS = _SavePolicy(EXPENSIVE)
"""Saves everything that is expensive to compute, and no gathered weight."""


def _save_policy(settings: Rematerialization) -> _SavePolicy:
    policy = {
        "none": ALL_BUT_WEIGHTS,
        "dots": _SavePolicy(SUMS, projections=True),
        "attention": _SavePolicy(names=frozenset({ATTENTION})),
        "names": _SavePolicy(names=frozenset(settings.names)),
        "nothing": _SavePolicy(),
    }[settings.policy]
    return dataclasses.replace(policy, offload=settings.offload)


def rematerialized(
    function: Callable[..., Tree],
    policy: Rematerialization | Callable[..., Any],
    *,
    in_scan: bool = False,
) -> Callable[..., Tree]:
    """Returns a function whose backward pass recomputes what a policy does not save.

    Arguments, keyword arguments and outputs are any trees. Their arrays are traced; all
    other leaves (strings, Python numbers, functions) are passed through unchanged.
    Random keys are arguments like others, so the same dropout masks are drawn again.

    With `Rematerialization.offload`, the floating-point arrays among the arguments are
    kept in the host's pinned memory until the backward pass. Weights that are to stay
    on the device are bound to the function (a module's own are), not arguments.

    Args:
      function: any function, module or method.
      policy: what is saved, ignoring `skip_first` and `skip_last`; or a policy of
        `jax.checkpoint_policies`.
      in_scan: whether the function is the body of a `jax.lax.scan` of more than one
        step (a scan of one step compiles to no loop). There the compiler cannot merge
        the two computations and need not be prevented from it.

    Raises:
      InputError: if the arguments are to be offloaded, and the device cannot read
        pinned memory, or (when called) none of them is a floating-point array.
    """
    if not isinstance(policy, Rematerialization) or not policy.offload:
        return _checkpointed(function, policy, in_scan=in_scan)
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

    return _checkpointed(on_named, policy, in_scan=in_scan)


def _check_pinned_memory() -> None:
    device = jax.devices()[0]
    if all(memory.kind != PINNED for memory in device.addressable_memories()):
        raise InputError(
            f"Rematerialization.offload needs pinned host memory, which {device} does "
            "not have: set it to False"
        )


def _checkpointed(
    function: Callable[..., Tree],
    policy: Rematerialization | Callable[..., Any],
    *,
    in_scan: bool,
) -> Callable[..., Tree]:
    """Returns the function of `rematerialized`, which names the activations itself."""
    save = _save_policy(policy) if isinstance(policy, Rematerialization) else policy

    def call(*arguments: Any, **keywords: Any) -> Tree:
        inputs, static = _separate_arrays((arguments, keywords))
        static_outputs: list[_StaticLeaves] = []

        def on_arrays(arrays: list[Array]) -> list[Array]:
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

    def restore(self, arrays: Sequence[Array]) -> Any:
        """Returns the tree with its arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.array_indices, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def _separate_arrays(tree: Any) -> tuple[list[Array], _StaticLeaves]:
    """Splits a tree into its arrays and everything else."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = (jax.Array, np.ndarray, np.generic)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    arrays = [leaves[i] for i in places]
    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    return arrays, _StaticLeaves(structure, others, places)


def scan_blocks(
    body: Body,
    hidden: Tree,
    parameters: dict[str, Array],
    others: Any,
    policy: Rematerialization,
    *,
    gathers: bool = False,
) -> tuple[Tree, Any]:
    """`jax.lax.scan` over blocks, in parts where some blocks are skipped.

    Args:
      body: `f(hidden, (one block's parameters, one block's others))`, which returns
        hidden states and a tree.
      hidden: input of the first block, a tree of arrays.
      parameters: parameters of all blocks, by path, stacked on `L`.
      others: tree of each block's other inputs, stacked on `L`.
      policy: what is saved for the backward pass.
      gathers: whether blocks gather their weights from several devices.

    Returns:
      the output of the last block, and the trees, stacked on `L`.

    Raises:
      InputError: if `policy` names an activation that no block has.
    """

    def named_body(hidden, layer):
        return body(named(hidden, BLOCK_INPUT), layer)

    with _check_names(policy):
        if policy.skipped_blocks:
            return _scan_in_parts(named_body, hidden, parameters, others, policy)
        if policy.active or gathers:
            count = len(next(iter(parameters.values())))
            named_body = _checkpointed(named_body, policy, in_scan=count > 1)
        return jax.lax.scan(named_body, hidden, (parameters, others))


def _scan_in_parts(body, hidden, parameters, others, policy):
    """Scans over the skipped blocks at both ends and the blocks between them.

    Each scan slices its blocks' parameters from the stack of all blocks by index,
    inside the rematerialized function: slicing the stack beforehand would copy it.
    """
    count = len(next(iter(parameters.values())))
    plain, last = Rematerialization(), count - policy.skip_last
    outputs = []  # of each part, trees stacked on its blocks

    def indexed_body(hidden, layer):
        index, block_others = layer
        block = {
            path: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
            for path, stack in parameters.items()
        }
        return body(hidden, (block, block_others))

    for start, stop, part_policy in (
        (0, policy.skip_first, plain),
        (policy.skip_first, last, policy),
        (last, count, plain),
    ):
        if start < stop:
            # The other inputs are small, so they are sliced before the scan.
            part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], others)
            step = _checkpointed(indexed_body, part_policy, in_scan=stop - start > 1)
            hidden, output = jax.lax.scan(step, hidden, (jnp.arange(start, stop), part))
            outputs.append(output)
    return hidden, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


@contextlib.contextmanager
def _check_names(policy: Rematerialization) -> Iterator[None]:
    """Checks, once blocks are traced, that the activations to save exist."""
    token = _seen_names.set(set())
    try:
        yield
        seen = _seen_names.get() or set()
    finally:
        _seen_names.reset(token)
    missing = sorted(set(policy.names) - seen)
    if missing:
        raise InputError(
            f"Rematerialization.names has {shown(missing[0])}, but the blocks name "
            f"{', '.join(sorted(seen))}; name your own activations with "
            "rematerialization.named(x, name)"
        )
