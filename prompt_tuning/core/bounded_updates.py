"""Optimizers that keep rows of parameters close to their start, or some as they are."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

MOVING = "/moving"
"""End of the names of trained slots in the optimizer's state."""


class Ball(NamedTuple):
    """Region that the rows of a parameter must stay in.

    Attributes:
      center: center of each row's ball, `[P, D]`.
      radius: largest distance of each row from it, `[P]`.
    """

    center: Float[np.ndarray, "P D"]
    radius: Float[np.ndarray, "P"]

    def nearest(self, rows: Float[Array, "P D"]) -> Float[Array, "P D"]:
        """Projects rows to the nearest points inside."""
        change = rows - self.center
        distance = jnp.linalg.norm(change, axis=-1)
        share = self.radius / jnp.maximum(distance, jnp.maximum(self.radius, 1e-30))
        return jnp.asarray(self.center) + share[:, None] * change


def stay_in_balls(
    optimizer: optax.GradientTransformation, balls: Mapping[str, Ball]
) -> optax.GradientTransformation:
    """Returns a transformation that moves updated parameters back into their balls.

    `balls` has the ball of some parameters, by path.
    """
    if not balls:
        return optimizer

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, state = optimizer.update(updates, state, params)
        moved = dict(cast(dict[str, Any], changes))
        for path, ball in balls.items():
            moved[path] = ball.nearest(params[path] + moved[path]) - params[path]
        return moved, state

    return optax.GradientTransformation(optimizer.init, update)


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
