"""Optimizers that freeze the first slots of a prefix, and hold no state for them."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

MOVING = "/moving"
"""End of the names of trained slots in the optimizer's state."""


def update_moving_slots(
    optimizer: optax.GradientTransformation, frozen: Mapping[str, int]
) -> optax.GradientTransformation:
    """Returns a transformation that hides the frozen slots from an optimizer.

    Args:
      optimizer: optimizer of all parameters; it knows a prefix at path `p` as `p +
        MOVING`.
      frozen: how many of the first slots are frozen, by the path of a prefix `[L, 2, P,
        G, K]`.
    """

    def moving(tree: Any) -> Any:
        return {
            path + MOVING if path in frozen else path: leaf[:, :, frozen[path] :]
            if path in frozen
            else leaf
            for path, leaf in tree.items()
        }

    def init(params: Any) -> Any:
        return optimizer.init(moving(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        parameters = None if params is None else moving(params)
        moved, state = optimizer.update(moving(updates), state, parameters)
        changes: Any = moved
        return {
            path: _behind_zeros(changes[path + MOVING], frozen[path])
            if path in frozen
            else changes[path]
            for path in updates
        }, state

    return optax.GradientTransformation(init, update)


def _behind_zeros(
    changes: Float[Array, "L 2 moving G K"], count: int
) -> Float[Array, "L 2 P G K"]:
    # Adding -0.0 keeps the bits of every number, also of 0.0 and of -0.0.
    padding = [(0, 0)] * changes.ndim
    padding[2] = (count, 0)
    return jnp.pad(changes, padding, constant_values=-0.0)
