"""Optimizers that keep rows of parameters close to where they started."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float


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
