"""The training state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from prompt_tuning.core.parameters import Parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that changes from step to step, usually a few kilobytes.

    Use it in your own training loop; see `train_step`. The fields have type Any because
    JAX transformations put other leaves in the tree.

    Attributes:
      trained: trained parameters by path, float32.
      optimizer_state: optimizer state of the trained parameters.
      step: number of steps done, int32 `[]`.
      key: key of the run, a typed key `[]`; each step folds in its own number.

    Examples:
      >>> trained, frozen = model.attach(pt.SoftPrompt(length=5)).partition()
      >>> state = pt.TrainState.create(trained, optax.sgd(0.1), jax.random.key(0))
      >>> int(state.step), list(state.trained)
      (0, ['decoder/prompt/prompt'])
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
        """Creates the state before the first step."""
        return cls(trained, optimizer.init(trained), jnp.zeros((), jnp.int32), key)
