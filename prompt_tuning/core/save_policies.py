"""`jax.checkpoint` policies: which named activations and products are saved."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

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
