"""Dropout in the branches that adapters add to projections.

A projection knows neither the step's random key nor which rows it reads. So its block
sets both while it is traced, and each adapter draws its own mask.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.parameters import named_key


class _Draws(NamedTuple):
    key: Key[Array, ""] | None
    numbers: Int[Array, "*lead"]


_draws: contextvars.ContextVar[_Draws | None] = contextvars.ContextVar(
    "_draws", default=None
)


@contextlib.contextmanager
def branch_draws(
    key: Key[Array, ""] | None, numbers: Int[Array, "*lead"]
) -> Iterator[None]:
    """Sets what the masks of one block's adapters are drawn from.

    `numbers` are the indices of positions in the whole batch, the leading axes of the
    projections' inputs. A `key` of None disables dropout.
    """
    token = _draws.set(_Draws(key, numbers))
    try:
        yield
    finally:
        _draws.reset(token)


def branch_dropout(
    x: Float[Array, "*lead in"], rate: float, name: str, first: Int[Array, ""] | int
) -> Float[Array, "*lead in"]:
    """Applies dropout to a branch's input, with the same mask on every mesh.

    Args:
      x: input of the branch.
      rate: share of the elements that are zeroed.
      name: name of the branch, unique within a block.
      first: index of the first column of `x` among the columns of all devices.
    """
    draws = _draws.get()
    if draws is None or draws.key is None or rate == 0.0:
        return x
    index = DropoutIndex.at_positions(draws.numbers, x.shape[-1], first)
    return dropout(x, rate, named_key(draws.key, name), index)
