"""What of the blocks' activations is kept for the backward pass, and where.

Kept is either the outcome of a forward pass or what it is made again from (Chen et al.
2016). A block's *outer* activation is what enters it, its *inner* ones are all else:
the first can be moved to the host's memory, the second computed again, or both.

Whatever the policy, weights that a block gathers or reads from the stack of all blocks
are gathered and read again: kept for the backward pass they would be a second copy of
the model.
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
from jaxtyping import Array, Float

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields

POLICIES = ("none", "dots", "attention", "names", "nothing")
BLOCK_INPUT = "block_input"
ATTENTION = "attention"

# Summed over devices: made again, it would be sent again.
SUMS = frozenset({"psum", "psum_invariant", "psum2", "reduce_scatter"})
# Of a block that is not computed again: what takes products, sums over devices or
# random numbers to make. A mask of dropout is a comparison's outcome, a byte each.
EXPENSIVE = SUMS | {"dot_general", "exp", "ge"}

Tree = TypeVar("Tree")
Carry = TypeVar("Carry")
Body = Callable[[Carry, Any], tuple[Carry, Any]]

_offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[BLOCK_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)
_seen_names: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "names met", default=None
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rematerialization:
    """What of a stack's activations is kept for the backward pass, and where.

    Attributes:
      policy: which inner activations are kept, the others being computed again:
        "none" of them is computed again; "dots" keeps the outcome of each projection;
        "attention" keeps that of attention, before its output projection; "names" keeps
        those that `names` lists; "nothing" keeps none, so that each block runs twice.
      names: of policy "names": what `named` calls "query", "keys", "values",
        "attention", "gate" and "up" in the blocks, and what it calls in yours.
      skip_first: so many blocks at the start compute nothing but element-wise
        operations again, and offload nothing.
      skip_last: so many at the end.
      offload: whether what enters each block is moved to the host's pinned memory, and
        back when the backward pass comes to the block.

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
                f"Rematerialization.policy is {self.policy!r}, expected one of {listed}"
            )
        if isinstance(self.names, str) or not isinstance(self.names, Sequence):
            raise InputError(
                f"Rematerialization.names is {self.names!r}, expected a list of texts"
            )
        # Part of a model's structure, by which compiled programs are found.
        object.__setattr__(self, "names", tuple(self.names))
        if bool(self.names) != (self.policy == "names"):
            raise InputError(
                f"Rematerialization.names is {self.names} and policy {self.policy!r}: "
                "names are for policy 'names', which needs some"
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
                f"Rematerialization leaves out {self.skip_first} blocks at the start "
                f"and {self.skip_last} at the end, but its policy is 'none' and "
                "nothing is offloaded: choose a policy, or leave out no block"
            )

    @property
    def active(self) -> bool:
        """Whether anything is computed again or moved."""
        return self.policy != "none" or self.offload

    @property
    def skipped_blocks(self) -> int:
        """How many blocks are left out."""
        return self.skip_first + self.skip_last

    def without_skips(self) -> "Rematerialization":
        """The same, with no block left out."""
        return dataclasses.replace(self, skip_first=0, skip_last=0)

    def check_layers(self, stack: str, layers: int) -> None:
        """Refuses to leave out every block.

        Args:
          stack: "encoder" or "decoder", for the message.
          layers: blocks of it.

        Raises:
          InputError: with the numbers.
        """
        if self.skipped_blocks and self.skipped_blocks >= layers:
            raise InputError(
                f"Rematerialization leaves out {self.skip_first} + {self.skip_last} "
                f"blocks of a {stack} that has {layers}: leave out fewer, or choose "
                "the policy 'none'"
            )


def named(x: Tree, name: str) -> Tree:
    """Gives an activation a name by which the policy "names" may keep it."""
    met = _seen_names.get()
    if met is not None:
        met.add(name)
    return checkpoint_name(x, name)


@dataclasses.dataclass(frozen=True)
class _SavePolicy:
    """A policy of `jax.checkpoint`: what is kept of what a function computes.

    It names what is kept, and so refuses what is not listed: `all_gather`, the slice of
    a stack of weights, and what is cast of either.
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
            # Scores have batch axes; there are as many as pairs of positions.
            _, batch_axes = parameters["dimension_numbers"]
            return not any(batch_axes)
        return primitive.name in self.primitives


ALL_BUT_WEIGHTS = _SavePolicy(EXPENSIVE)
"""Keeps all that is dear to compute and no weight that was gathered."""


def _save_policy(how: Rematerialization) -> _SavePolicy:
    kept = {
        "none": ALL_BUT_WEIGHTS,
        "dots": _SavePolicy(SUMS, projections=True),
        "attention": _SavePolicy(names=frozenset({ATTENTION})),
        "names": _SavePolicy(names=frozenset(how.names)),
        "nothing": _SavePolicy(),
    }[how.policy]
    return dataclasses.replace(kept, offload=how.offload)


def rematerialized(
    function: Callable[..., Tree],
    policy: Rematerialization | Callable[..., Any],
    *,
    in_scan: bool = False,
) -> Callable[..., Tree]:
    """A function whose backward pass computes again what a policy does not keep.

    Arguments, keyword arguments and outputs are any trees. Of their leaves arrays are
    traced; all others (texts, Python's numbers, functions) are handed through as they
    are. Random keys are arguments like others, so the same masks are drawn again.

    Args:
      function: of anything; a module, or a method of one.
      policy: what is kept; `skip_first` and `skip_last` mean nothing here. Or a policy
        of `jax.checkpoint_policies`.
      in_scan: whether it is the body of a `jax.lax.scan` of more than one step (one
        is no loop once compiled), where nothing merges the two computations and the
        compiler need not be kept from it.
    """
    keep = _save_policy(policy) if isinstance(policy, Rematerialization) else policy

    def call(*arguments: Any, **keywords: Any) -> Tree:
        given, others = _separate_arrays((arguments, keywords))
        made: list[_StaticLeaves] = []

        def on_arrays(arrays: list[Array]) -> list[Array]:
            arguments, keywords = others.restore(arrays)
            outputs, rest = _separate_arrays(function(*arguments, **keywords))
            made[:] = [rest]
            return outputs

        outputs = jax.checkpoint(on_arrays, policy=keep, prevent_cse=not in_scan)(given)
        return made[0].restore(outputs)

    return call


class _StaticLeaves(NamedTuple):
    """A tree without its arrays.

    Attributes:
      structure: of the tree.
      leaves: of the tree, `None` in the places of arrays.
      places: of the arrays among the leaves.
    """

    structure: Any
    leaves: list[Any]
    array_indices: list[int]

    def restore(self, arrays: Sequence[Array]) -> Any:
        """The tree with its arrays."""
        leaves = list(self.leaves)
        for place, array in zip(self.array_indices, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def _separate_arrays(tree: Any) -> tuple[list[Array], _StaticLeaves]:
    leaves, structure = jax.tree.flatten(tree)
    kinds = (jax.Array, np.ndarray, np.generic)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]
    arrays = [leaves[i] for i in places]
    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    return arrays, _StaticLeaves(structure, others, places)


def scan_blocks(
    body: Body,
    hidden: Float[Array, "n D"],
    parameters: dict[str, Array],
    others: Any,
    how: Rematerialization,
    *,
    gathers: bool = False,
) -> tuple[Float[Array, "n D"], Any]:
    """`jax.lax.scan` over blocks, cut where some of them are rematerialised otherwise.

    Args:
      body: `f(hidden, (one block's parameters, one block's others))`, which gives
        hidden states and a tree.
      hidden: what enters the first block.
      parameters: of all blocks, by path, stacked on `L`.
      others: a tree of what else each block has, stacked on `L`.
      how: what is kept for the backward pass.
      gathers: whether blocks put their weights together from several devices.

    Returns:
      what leaves the last block, and the trees, stacked on `L`.

    Raises:
      InputError: if `how` names an activation that no block has.
    """

    def entered(hidden, layer):
        return body(named(hidden, BLOCK_INPUT), layer)

    with _check_names(how):
        if not how.skipped_blocks:
            if how.active or gathers:
                count = len(next(iter(parameters.values())))
                entered = rematerialized(entered, how, in_scan=count > 1)
            return jax.lax.scan(entered, hidden, (parameters, others))
        return _scan_in_parts(entered, hidden, parameters, others, how)


def _scan_in_parts(body, hidden, parameters, others, how):
    """Three scans, of those blocks that are left out and those between them.

    Each reads its blocks' parameters from the stack of all, by number and inside of
    what is rematerialised: cut up, the stack would be in memory twice.
    """
    count = len(next(iter(parameters.values())))
    plain, last = Rematerialization(), count - how.skip_last
    made = []

    def numbered(hidden, layer):
        number, own = layer
        block = {
            path: jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
            for path, stack in parameters.items()
        }
        return body(hidden, (block, own))

    for start, stop, kept in (
        (0, how.skip_first, plain),
        (how.skip_first, last, how),
        (last, count, plain),
    ):
        if start < stop:
            own = jax.tree.map(lambda x, a=start, b=stop: x[a:b], others)
            step = rematerialized(numbered, kept, in_scan=stop - start > 1)
            hidden, part = jax.lax.scan(step, hidden, (jnp.arange(start, stop), own))
            made.append(part)
    return hidden, jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)


@contextlib.contextmanager
def _check_names(how: Rematerialization) -> Iterator[None]:
    """Checks, once blocks are traced, that they have what is to be kept."""
    token = _seen_names.set(set())
    try:
        yield
        met = _seen_names.get() or set()
    finally:
        _seen_names.reset(token)
    missing = sorted(set(how.names) - met)
    if missing:
        raise InputError(
            f"Rematerialization.names has {missing[0]!r}, but the blocks name "
            f"{', '.join(sorted(met))}; of your own activations say "
            "rematerialization.named(x, name)"
        )
