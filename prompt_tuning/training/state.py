"""What changes from step to step: a few kilobytes."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.models.host_memory import is_on_host
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step reads and replaces; frozen parameters are not in it.

    The fields are typed Any because transformations put their own leaves in a tree.

    Attributes:
      trained: trained parameters by path, float32.
      optimizer_state: of these parameters alone.
      step: steps done, int32 `[]`.
      key: of the run, a typed key `[]`; each step folds its number in.
    """

    trained: Any
    optimizer_state: Any
    step: Any
    key: Any

    @classmethod
    def create(
        cls,
        trained: Parameters,
        optimizer: optax.GradientTransformation,
        key: Key[Array, ""],
    ) -> "TrainState":
        """The state before the first step."""
        return cls(trained, optimizer.init(trained), jnp.zeros((), jnp.int32), key)


def fingerprint(
    frozen: Mapping[str, Array | LayeredWeight],
    placement: Placement | None = None,
    samples: int = 64,
) -> str:
    """A digest by which a run knows its frozen model again.

    It covers every parameter's path, shape and type, and `samples` numbers of each,
    evenly spaced, so that it takes no time on a large model.

    Args:
      frozen: the frozen parameters.
      placement: where they lie on a mesh, of which the digest says nothing.
      samples: numbers read of each parameter.
    """
    digest = hashlib.sha256()
    in_reach = placement is None and jax.default_backend() == "cpu"
    for path in sorted(frozen):
        leaf: Any = frozen[path]
        shape = leaf.shape if placement is None else placement.abstract[path].shape
        size = math.prod(shape)
        digest.update(f"{path} {shape} {leaf.dtype}".encode())
        places = np.linspace(0, size - 1, min(samples, size)).astype(int)
        if isinstance(leaf, jax.Array) and (in_reach or is_on_host(leaf)):
            # Single numbers are picked on the device, by a program for each shape.
            leaf = np.asarray(leaf)
        picked = leaf[np.unravel_index(places, shape)] if size else leaf
        if placement is not None:
            picked = placement.to_host(picked)
        digest.update(np.asarray(picked).tobytes())
    return digest.hexdigest()
