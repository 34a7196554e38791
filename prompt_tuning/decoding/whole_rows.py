"""The program that reads whole rows into slots where chunks are not possible."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.decoding.slot_state import (
    BlockKeyValues,
    Integers,
    Slots,
    write_rows,
)
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.recurrent_state import replace_rows
from prompt_tuning.models.streams import Context


@functools.partial(WeightedJit, static_argnames="graph", donate_argnames="slots")
def read_whole_rows(
    parameters: Parameters,
    slots: Slots,
    numbers: Integers,
    tokens: Integers,
    lengths: Integers,
    prompt_ids: Integers | None,
    *,
    graph: nnx.GraphDef,
) -> tuple[Slots, Int[Array, "R"], Int[Array, "R"]]:
    """Reads whole rows into their slots, with the model that has their adapter.

    Needed for rows of encoder-decoders, rows with a prompt inside the text, and rows
    with bidirectional attention. `slots` is donated; a row may be repeated; `tokens`
    are padded to `T`. `graph` and `parameters` include the prompts and adapters.
    Returns the slots, the number of keys written per row, and the position of its first
    key.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    prompts = None if prompt_ids is None else jnp.asarray(prompt_ids)
    hidden, cache = model.prefill(jnp.asarray(tokens), jnp.asarray(lengths), 1, prompts)
    text, rows = cache.past[-1], len(hidden)
    assert isinstance(text.key_values, KeyValues)
    # The slots may be expanded for another adapter.
    own = slots.in_form(text.key_values, model)
    size = min(own.keys.shape[3], slots.section_ends[-1])
    written = jnp.full(rows, size)
    if text.mask is not None:
        written = _row_marks(text.mask, rows).sum(1)
    slots = dataclasses.replace(
        slots,
        own=_write_whole_rows(slots, own, numbers),
        hidden=slots.hidden.at[numbers].set(hidden),
    )
    if slots.state is not None and cache.state is not None:
        state = replace_rows(slots.state, cache.state, jnp.asarray(numbers))
        slots = dataclasses.replace(slots, state=state)
    if slots.cross is not None and slots.cross_mask is not None:
        slots = _write_cross(slots, numbers, cache.cross)
    return slots, written, cache.next_positions - written


def _write_whole_rows(
    slots: Slots, new: KeyValues, numbers: Integers
) -> tuple[BlockKeyValues, ...]:
    """Writes `[L, G, R, S, K]` into slots, starting at their first column."""
    at = np.zeros(len(numbers), np.int32)
    results = []
    for section, end in zip(slots.own, slots.section_ends, strict=True):
        columns = slice(end - section.length, end)
        part = KeyValues(*(array[:, :, :, columns] for array in new))
        written = part.keys.shape[3] > 0
        results.append(write_rows(section, part, numbers, at) if written else section)
    return tuple(results)


def _row_marks(mask: Bool[Array, "_ 1 1 S"], rows: int) -> Bool[Array, "R S"]:
    """Returns the mask of each row's keys."""
    return jnp.broadcast_to(mask[:, 0, 0], (rows, mask.shape[-1]))


def _write_cross(slots: Slots, numbers: Integers, cross: Sequence[Context]) -> Slots:
    """Writes the encoder outputs that the rows' decoder attends to."""
    assert slots.cross is not None and slots.cross_mask is not None
    capacity, rows = slots.cross_mask.shape[1], len(numbers)
    parts, marks = [], []
    for context in cross:
        key_values = context.key_values
        assert isinstance(key_values, KeyValues)
        chosen = context.rows
        if chosen is None:  # all rows share a prompt's output
            chosen = jnp.arange(rows) * context.row_count // rows
        key_values = KeyValues(*(part[:, :, chosen] for part in key_values))
        mask, every = context.mask, jnp.ones((rows, key_values.keys.shape[3]), bool)
        marks.append(every if mask is None else _row_marks(mask, rows))
        parts.append(key_values)
    joined = KeyValues(
        *(jnp.concatenate(each, axis=3) for each in zip(*parts, strict=True))
    )
    mark = jnp.concatenate(marks, axis=1)
    padding = capacity - mark.shape[1]
    mark = jnp.pad(mark, ((0, 0), (0, max(padding, 0))))[:, :capacity]
    joined = KeyValues(*(part[:, :, :, :capacity] for part in joined))
    return dataclasses.replace(
        slots,
        cross=write_rows(slots.cross, joined, numbers, np.zeros(rows, np.int32)),
        cross_mask=slots.cross_mask.at[numbers].set(mark),
    )
