"""What changes from step to step: a few kilobytes."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Key

from prompt_tuning.models.parameters import Parameters


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


def fingerprint(frozen: Mapping[str, Array], samples: int = 64) -> str:
    """A digest by which a run knows its frozen model again.

    It covers every parameter's path, shape and type, and `samples` numbers of each,
    evenly spaced, so that it takes no time on a large model.

    Args:
      frozen: the frozen parameters, all or abstractly equal ones of several processes.
      samples: numbers read of each parameter.
    """
    digest = hashlib.sha256()
    for path in sorted(frozen):
        leaf = frozen[path]
        digest.update(f"{path} {leaf.shape} {leaf.dtype}".encode())
        places = np.linspace(0, leaf.size - 1, min(samples, leaf.size)).astype(int)
        picked = leaf.ravel()[places] if leaf.size else leaf
        digest.update(np.asarray(picked).tobytes())
    return digest.hexdigest()
