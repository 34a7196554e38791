"""Where adapters act that tokens of a text invoke (aLoRA, Greenewald et al. 2025).

Such an adapter acts from the last occurrence of its invocation on, and nowhere in a row
without one. A projection knows neither tokens nor rows: the stack sets the positions
while its blocks are traced, like the keys in `branch_dropout`.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NEVER = 2**30
"""A column that no row has."""

_active: contextvars.ContextVar[Bool[Array, "n"] | None] = contextvars.ContextVar(
    "_active", default=None
)


@contextlib.contextmanager
def active_positions(marks: Bool[Array, "n"] | None) -> Iterator[None]:
    """Sets the positions at which adapters act; None if no adapter needs them.

    `marks` has one entry per input of the projections.
    """
    token = _active.set(marks)
    try:
        yield
    finally:
        _active.reset(token)


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
