"""The programs that read tokens into slots.

A slot holds the keys and values of one row. The keys of prompts and of shared texts are
in pages that rows attend to together. Each page is a separate source of attention, read
once a step, with the rows masked that do not see it. A masked page adds exactly 0 to a
row's sums, and a row's pages keep their order. So the results of a row do not depend on
which other pages are read.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core import masks
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.status_line import update_status
from prompt_tuning.decoding.row_adapters import row_entries
from prompt_tuning.decoding.slot_state import (
    BlockKeyValues,
    Integers,
    Page,
    RowStates,
    Slots,
)
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.streams import Context, Stream


def _page_contexts(
    pages: Sequence[Page], visible: Integers, *, stacked: bool = False
) -> list[Context]:
    """Returns the pages as rows attend to them.

    Args:
      pages: the pages.
      visible: number of keys that each row sees of each page, `[B, pages]`.
      stacked: whether the model scans over its blocks.
    """
    contexts = []
    for i, page in enumerate(pages):
        columns = jnp.arange(page.size)
        mask = (columns < visible[:, i, None])[:, None, None]  # [B, 1, 1, page]
        positions = (page.start + columns)[None]
        key_values = page.key_values()
        source = key_values.stacked() if stacked else key_values.as_source()
        contexts.append(Context(source, mask, None, positions))
    return contexts


def _own_context(own: KeyValues, written: Integers, first: Integers) -> Context:
    """Returns the rows' own keys as context of their next tokens."""
    columns = jnp.arange(own.keys.shape[3])
    mask = (columns < written[:, None])[:, None, None]  # [B, 1, 1, length]
    return Context(own, mask, None, jnp.asarray(first)[:, None] + columns)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="slots")
def read_tokens(
    parameters: Parameters,
    slots: Slots,
    tokens: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
) -> Slots:
    """Reads one token in each active slot.

    Args:
      parameters: all parameters of the model, and the tables of adapters, by path;
        a block's kernels may be `BlockArrays`.
      slots: all slots; donated.
      tokens: next token of each row, `[B]`.
      rows: state of each row.
      pages: the pages that some row sees.
      graph: structure of the model.
    """
    update_status(f"compiling the generation ({len(rows.written)} rows)")
    model = cast(LanguageModel, merge(graph, parameters))
    window = jnp.asarray(tokens)[:, None]
    hidden, own = _read_window(model, slots, window, jnp.array(1), rows, pages)
    hidden = _replace_active(slots.hidden, hidden[:, 0], rows)
    return dataclasses.replace(slots, own=own, hidden=hidden)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="slots")
def read_guesses(
    parameters: Parameters,
    slots: Slots,
    tokens: Integers,
    counts: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
) -> tuple[Slots, Int[Array, "B"]]:
    """Reads a token and guesses of the next ones in each active slot.

    Greedy speculative decoding (Leviathan et al. 2023, section 2): a guess is right if
    it is the most probable token after the ones before it, all of them right.

    Args:
      parameters: as in `read_tokens`.
      slots: all slots; donated.
      tokens: the next token of each row and its guesses, `[B, W]`, padded.
      counts: number of tokens of each row in it, `[B]`.
      rows: state of each row.
      pages: the pages that some row sees.
      graph: structure of the model.

    Returns:
      the slots, and the number of right guesses of each row.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    window, counts = jnp.asarray(tokens), jnp.asarray(counts)
    hidden, own = _read_window(model, slots, window, counts[:, None], rows, pages)
    logits = model.token_logits(hidden[:, :-1])
    right = jnp.argmax(logits, axis=-1) == window[:, 1:]  # [B, W - 1]
    right &= jnp.arange(right.shape[1]) < counts[:, None] - 1
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(1)
    last = jnp.take_along_axis(hidden, accepted[:, None, None], axis=1)[:, 0]
    hidden = _replace_active(slots.hidden, last, rows)
    return dataclasses.replace(slots, own=own, hidden=hidden), accepted


def _replace_active(
    old: Float[Array, "B D"], new: Float[Array, "B D"], rows: RowStates
) -> Float[Array, "B D"]:
    """Returns the new states of active rows and the old ones of the rest."""
    return jnp.where(jnp.asarray(rows.active)[:, None], new, old)


def _read_window(
    model: LanguageModel,
    slots: Slots,
    tokens: Int[Array, "B W"],
    counts: Int[Array, "#B 1"] | Int[Array, ""],
    rows: RowStates,
    pages: tuple[Page, ...],
) -> tuple[Float[Array, "B W D"], BlockKeyValues]:
    """Runs the next tokens of all rows, and writes the first `counts` of active ones.

    Returns:
      the states that predict the token after each, and the rows' own keys and values.
    """
    embedded = model.token_embedder(tokens, model.config.dtype)
    columns = jnp.asarray(rows.written)[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.asarray(rows.first)[:, None] + columns
    cross = ()
    if slots.cross is not None and slots.cross_mask is not None:
        cross = (Context(slots.cross.as_source(), slots.cross_mask[:, None, None]),)
    mask = None if tokens.shape[1] == 1 else masks.CausalMask(None)
    with row_entries(jnp.asarray(rows.entry)):
        hidden, key_values = model.extend(
            Stream(embedded, positions, mask),
            [
                *_page_contexts(pages, rows.visible),
                _own_context(slots.own.as_source(), rows.written, rows.first),
            ],
            cross,
        )
    active = jnp.asarray(rows.active)[:, None]
    written = active & (jnp.arange(tokens.shape[1]) < counts)
    # A column past the end is dropped.
    column = jnp.where(written, columns, slots.own.keys.shape[3])  # [B, W]
    # Keys that are written after the blocks have read the old ones replace them in
    # place; otherwise the compiler would copy them.
    column = _computed_after(column, hidden)
    numbers = jnp.arange(len(tokens))[:, None]

    def write(buffer: Array, new: Array) -> Array:
        return buffer.at[:, numbers, column].set(new, mode="drop")

    return hidden, slots.own.map(write, key_values)


def _computed_after(
    columns: Int[Array, "B W"], state: Float[Array, "B W D"]
) -> Int[Array, "B W"]:
    """Returns `columns`, but makes the compiler wait for `state` first.

    A barrier would not do: the compiler removes it before it decides what to copy.
    """
    bits = jax.lax.bitcast_convert_type(state[0, 0, 0].astype(jnp.float32), jnp.int32)
    # At least 2**30, whatever the bits.
    return jnp.minimum(columns, bits & 0x7FFFFFFF | 0x40000000)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="slots")
def read_chunks(
    parameters: Parameters,
    slots: Slots,
    numbers: Integers,
    tokens: Integers | Float[Array, "R C D"] | Float[np.ndarray, "R C D"],
    counts: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
) -> tuple[Slots, Float[Array, "R C D"]]:
    """Reads the next chunk of some rows' texts into their slots.

    Args:
      parameters: as in `read_tokens`.
      slots: all slots; donated.
      numbers: slot of each row, `[R]`; a row may be repeated.
      tokens: the chunks, `[R, C]`, padded; or their vectors, `[R, C, D]`.
      counts: number of real tokens of each chunk.
      rows: state of each row.
      pages: the pages that some row sees.
      graph: structure of the model.

    Returns:
      the slots, and the states that predict the token after each.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    chosen = jnp.asarray(numbers)
    past = slots.own.map(lambda part: part[:, chosen]).stacked()
    hidden, key_values = _run_chunks(model, tokens, rows, pages, past)
    own = _write_rows(slots.own, key_values, numbers, rows.written)
    last = hidden[jnp.arange(len(hidden)), jnp.asarray(counts) - 1]  # [R, D]
    slots = dataclasses.replace(
        slots, own=own, hidden=slots.hidden.at[numbers].set(last)
    )
    return slots, hidden


@functools.partial(jax.jit, static_argnames="graph")
def read_page(
    parameters: Parameters,
    tokens: Integers,
    row: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
) -> Page:
    """Reads a stretch of a shared text, which becomes a page.

    Args:
      parameters: as in `read_tokens`.
      tokens: the stretch, `[1, page]`, padded.
      row: `first` is the position of its first token, `visible` what it sees.
      pages: the pages before it.
      graph: structure of the model.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    _, key_values = _run_chunks(model, tokens, row, pages, None)
    return Page.create(key_values, row.first[0])


def _run_chunks(
    model: LanguageModel,
    tokens: Integers | Float[Array, "R C D"] | Float[np.ndarray, "R C D"],
    rows: RowStates,
    pages: tuple[Page, ...],
    own: KeyValues | None,
) -> tuple[Float[Array, "R C D"], KeyValues]:
    """Runs chunks of some rows after the keys that they see."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim == 3:
        embedded = tokens.astype(model.config.dtype)
    else:
        embedded = model.output_embedder(tokens, model.config.dtype)
    start = jnp.asarray(rows.first + rows.written)[:, None]
    positions = start + jnp.arange(tokens.shape[1])
    past = _page_contexts(pages, rows.visible, stacked=True)
    if own is not None:
        past.append(_own_context(own, rows.written, rows.first))
    with row_entries(jnp.asarray(rows.entry)):
        return model.extend(Stream(embedded, positions, masks.CausalMask(None)), past)


def _write_rows(
    buffer: BlockKeyValues,
    new: KeyValues,
    numbers: Integers,
    columns: Integers | Sequence[int],
) -> BlockKeyValues:
    """Writes `[L, G, R, S, K]` into slots, each row from its column on."""
    slots, starts = jnp.asarray(numbers), jnp.asarray(columns)

    def write_row(row: Int[Array, ""], buffer: BlockKeyValues) -> BlockKeyValues:
        def write(old: Array, parts: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(parts, row, 1, axis=1)
            return jax.lax.dynamic_update_slice(
                old, part, (0, slots[row], starts[row], 0)
            )

        return buffer.map(write, new)

    return jax.lax.fori_loop(0, len(slots), write_row, buffer)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="slots")
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
    """Reads whole rows into their slots, by the model with the rows' adapter.

    Some rows cannot be read in chunks: rows of encoder-decoders, rows with a prompt
    inside the text, and rows with attention in both directions.

    Args:
      parameters: all parameters of the model with its prompts and adapters, by path.
      slots: all slots; donated.
      numbers: slot of each row, `[R]`; a row may be repeated.
      tokens: the rows, `[R, T]`, padded.
      lengths: number of real tokens of each, `[R]`.
      prompt_ids: number of each row's prompt, `[R]`, or None.
      graph: structure of that model.

    Returns:
      the slots, the number of keys written of each row, and the position of the first
      of them.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    prompts = None if prompt_ids is None else jnp.asarray(prompt_ids)
    hidden, cache = model.prefill(jnp.asarray(tokens), jnp.asarray(lengths), 1, prompts)
    text, rows = cache.past[-1], len(hidden)
    assert isinstance(text.key_values, KeyValues)
    capacity = slots.own.keys.shape[3]
    size = min(text.key_values.keys.shape[3], capacity)
    short = KeyValues(*(part[:, :, :, :size] for part in text.key_values))
    written = jnp.full(rows, size)
    if text.mask is not None:
        written = _row_marks(text.mask, rows).sum(1)
    slots = dataclasses.replace(
        slots,
        own=_write_rows(slots.own, short, numbers, [0] * rows),
        hidden=slots.hidden.at[numbers].set(hidden),
    )
    if slots.cross is not None and slots.cross_mask is not None:
        slots = _write_cross(slots, numbers, cache.cross)
    return slots, written, cache.next_positions - written


def _row_marks(mask: Bool[Array, "_ 1 1 S"], rows: int) -> Bool[Array, "R S"]:
    """Returns the mask of each row's keys."""
    return jnp.broadcast_to(mask[:, 0, 0], (rows, mask.shape[-1]))


def _write_cross(slots: Slots, numbers: Integers, cross: Sequence[Context]) -> Slots:
    """Writes what the rows' decoder attends to of their encoder's output."""
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
        cross=_write_rows(slots.cross, joined, numbers, [0] * rows),
        cross_mask=slots.cross_mask.at[numbers].set(mark),
    )


@functools.partial(jax.jit, donate_argnames="slots")
def copy_slot(slots: Slots, source: Integers, target: Integers) -> Slots:
    """Copies a row that was read and not continued into another slot."""

    def copy(buffer: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(buffer, source, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(buffer, part, target, axis=1)

    own = slots.own.map(copy)
    cross, mask = slots.cross, slots.cross_mask
    if cross is not None and mask is not None:
        cross = cross.map(copy)
        mask = mask.at[target].set(mask[source])
    hidden = slots.hidden.at[target].set(slots.hidden[source])
    return Slots(own, hidden, cross, mask)
