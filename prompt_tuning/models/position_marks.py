"""Marks of positions that adapters may ask for: real ones, and active ones."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool

from prompt_tuning.core.adapted_rows import active_positions, real_positions
from prompt_tuning.models.streams import Context, Stream


@contextlib.contextmanager
def positions_of(streams: Sequence[Stream], cross: Sequence[Context]) -> Iterator[None]:
    """Tells adapters about all positions, while the blocks are traced in this context.

    Targets after an encoder's output, `cross`, do not say where they end.
    """
    marks = None if cross else functools.partial(_marks_of_real, streams)
    with _active_positions_of(streams), real_positions(marks):
        yield


def _active_positions_of(
    streams: Sequence[Stream],
) -> contextlib.AbstractContextManager[None]:
    """Sets `Stream.active` of all positions while their blocks are traced."""
    if all(stream.active is None for stream in streams):
        return active_positions(None)
    marks = []
    for stream in streams:
        assert stream.active is not None  # of all streams, or of none
        shape = stream.hidden.shape[:2]
        marks.append(jnp.broadcast_to(stream.active, shape).reshape(-1))
    return active_positions(jnp.concatenate(marks))


def _marks_of_real(streams: Sequence[Stream]) -> Bool[Array, "n"]:
    """Marks the positions of all streams that are not padding."""
    marks = []
    for stream in streams:
        shape, real = stream.hidden.shape[:2], jnp.ones((1, 1), bool)
        if stream.segments is not None:
            real = stream.segments > 0
        elif stream.context_mask is not None:
            real = stream.context_mask[:, 0, 0]
        marks.append(jnp.broadcast_to(real, shape).reshape(-1))
    return jnp.concatenate(marks)
