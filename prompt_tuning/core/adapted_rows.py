"""What adapters ask about the rows that their projection reads.

A projection knows neither the step's random key nor which rows and tokens it reads. So
the stack and its blocks set all this while they are traced, and adapters ask for it:

- random draws for dropout in the branches that adapters add; each draws its own mask;
- which inputs are real, i.e. tokens or prompts, not padding;
- where adapters act that tokens of a text invoke (aLoRA, Greenewald et al. 2025): from
  the last occurrence of the invocation on, and nowhere in a row without one.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.parameters import named_key

NEVER = 2**30
"""A column that no row has."""

Value = TypeVar("Value")
Marks = Callable[[], Bool[Array, "n"]]


class _Draws(NamedTuple):
    key: Key[Array, ""] | None
    numbers: Int[Array, "*lead"]


_draws: ContextVar[_Draws | None] = ContextVar("_draws", default=None)
_marks: ContextVar[Marks | None] = ContextVar("_marks", default=None)
_active: ContextVar[Bool[Array, "n"] | None] = ContextVar("_active", default=None)


@contextlib.contextmanager
def _set(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def branch_draws(
    key: Key[Array, ""] | None, numbers: Int[Array, "*lead"]
) -> contextlib.AbstractContextManager[None]:
    """Sets what the masks of one block's adapters are drawn from.

    `numbers` are the indices of positions in the whole batch, the leading axes of the
    projections' inputs. A `key` of None disables dropout.
    """
    return _set(_draws, _Draws(key, numbers))


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


def real_positions(marks: Marks | None) -> contextlib.AbstractContextManager[None]:
    """Sets the function that marks the projections' real inputs; None if unknown.

    It is called only if an adapter asks.
    """
    return _set(_marks, marks)


def marked_positions() -> Bool[Array, "n"] | None:
    """Returns a mark for each input of a projection; None if unknown."""
    marks = _marks.get()
    return None if marks is None else marks()


def active_positions(
    marks: Bool[Array, "n"] | None,
) -> contextlib.AbstractContextManager[None]:
    """Sets the positions at which adapters act; None if no adapter needs them.

    `marks` has one entry per input of the projections.
    """
    return _set(_active, marks)


def any_inactive() -> bool:
    """Tests whether an adapter may be inactive at some positions."""
    return _active.get() is not None


def where_active(change: Float[Array, "n out"]) -> Float[Array, "n out"]:
    """Zeroes an adapter's addition where it is not active."""
    marks = _active.get()
    assert marks is not None  # every model with such an adapter sets it
    return jnp.where(marks[:, None], change, 0)


def first_active(ids: Sequence[int], invocation: Sequence[int]) -> int:
    """Returns the index from which an adapter is active in a text.

    It is the start of the invocation's last occurrence, 0 without an invocation, and
    `NEVER` if it does not occur.
    """
    count, wanted = len(invocation), list(invocation)
    starts = range(len(ids) - count, -1, -1)
    found = (i for i in starts if list(ids[i : i + count]) == wanted)
    return next(found, NEVER) if count else 0


def invoked_positions(
    tokens: Int[Array, "B T"], segments: Int[Array, "B T"], invocation: Sequence[int]
) -> Bool[Array, "B T"]:
    """Marks the positions from the last invocation of each example on.

    `segments` has each token's example, 0 for padding.
    """
    length = tokens.shape[1]
    columns = jnp.arange(length)
    starts = segments > 0
    for offset, token in enumerate(invocation):
        later = jnp.minimum(columns + offset, length - 1)
        inside = columns + offset < length
        starts &= inside & (tokens[:, later] == token)
        starts &= segments[:, later] == segments

    def in_same(nearest: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        known = (nearest >= 0) & (nearest < length)
        place = jnp.clip(nearest, 0, length - 1)
        return known & (jnp.take_along_axis(segments, place, axis=1) == segments)

    last_start = jax.lax.cummax(jnp.where(starts, columns, -1), axis=1)
    after = jax.lax.cummin(jnp.where(starts, columns, length), axis=1, reverse=True)
    after = jnp.pad(after[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    return in_same(last_start) & ~in_same(after)
