"""The programs that read tokens into slots.

A slot holds the keys and values of one row. The keys of prompts and shared texts are in
pages that rows share. Each page is a separate attention source, read once per step, and
masked for rows that do not see it. A masked page adds exactly 0 to a row's sums, and a
row's pages keep their order, so a row's results do not depend on other pages. For the
same reason they do not depend on the number of sections read, so a step reads only as
many as the longest row needs.

Recurrent layers have a state per slot instead. A row starts from the state after its
prompt, whatever the slot held before.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core import masks
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.status_line import update_status
from prompt_tuning.decoding.row_adapters import row_entries
from prompt_tuning.decoding.slot_state import (
    BlockKeyValues,
    Integers,
    Page,
    RowStates,
    Slots,
    write_rows,
)
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.recurrent_state import (
    RecurrentState,
    choose_rows,
    replace_rows,
)
from prompt_tuning.models.streams import Context, Kept, Stream


def _page_contexts(
    pages: Sequence[Page], visible: Integers, *, stacked: bool = False
) -> list[Context]:
    """Returns the pages as contexts, given the `visible [B, pages]` keys per row."""
    contexts = []
    for i, page in enumerate(pages):
        columns = jnp.arange(page.size)
        mask = (columns < visible[:, i, None])[:, None, None]  # [B, 1, 1, page]
        positions = (page.start + columns)[None]
        key_values = page.key_values()
        source = key_values.stacked() if stacked else key_values.as_source()
        contexts.append(Context(source, mask, None, positions))
    return contexts


def _own_contexts(
    own: Sequence[KeyValues], written: Integers, first: Integers
) -> list[Context]:
    """Returns sections of the rows' own keys as attention contexts."""
    contexts, start = [], 0
    for section in own:
        columns = start + jnp.arange(section.keys.shape[3])
        start += len(columns)
        mask = (columns < written[:, None])[:, None, None]  # [B, 1, 1, section]
        positions = jnp.asarray(first)[:, None] + columns
        contexts.append(Context(section, mask, None, positions))
    return contexts


@functools.partial(
    jax.jit, static_argnames=("graph", "sections"), donate_argnames="slots"
)
def read_tokens(
    parameters: Parameters,
    slots: Slots,
    tokens: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
    sections: int,
) -> Slots:
    """Reads one token in each active slot.

    `slots` is donated. A block's kernels may be `BlockArrays`. `sections` hold all keys
    of the active rows, including the new ones.
    """
    update_status(f"compiling the generation ({len(rows.written)} rows)")
    model = cast(LanguageModel, merge(graph, parameters))
    window = jnp.asarray(tokens)[:, None]
    hidden, slots = _read_window(
        model, slots, window, jnp.array(1), rows, pages, sections
    )
    hidden = _replace_active(slots.hidden, hidden[:, 0], rows)
    return dataclasses.replace(slots, hidden=hidden)


@functools.partial(
    jax.jit, static_argnames=("graph", "sections"), donate_argnames="slots"
)
def read_guesses(
    parameters: Parameters,
    slots: Slots,
    tokens: Integers,
    counts: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    *,
    graph: nnx.GraphDef,
    sections: int,
) -> tuple[Slots, Int[Array, "B"]]:
    """Reads the next token and guesses of later ones in each active slot.

    Greedy speculative decoding (Leviathan et al. 2023, section 2): a guess is right if
    it is the most probable token after the ones before it, and these are all right.
    `tokens` are the next token of each row and its guesses, `[B, W]`, padded; `counts`
    of them are valid. See `read_tokens` for the other arguments.

    Returns:
      the slots, and the number of right guesses per row.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    window, counts = jnp.asarray(tokens), jnp.asarray(counts)
    hidden, slots = _read_window(
        model, slots, window, counts[:, None], rows, pages, sections
    )
    with row_entries(jnp.asarray(rows.entry)):
        logits = model.token_logits(hidden[:, :-1])
    right = jnp.argmax(logits, axis=-1) == window[:, 1:]  # [B, W - 1]
    right &= jnp.arange(right.shape[1]) < counts[:, None] - 1
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(1)
    last = jnp.take_along_axis(hidden, accepted[:, None, None], axis=1)[:, 0]
    hidden = _replace_active(slots.hidden, last, rows)
    return dataclasses.replace(slots, hidden=hidden), accepted


def _replace_active(
    old: Float[Array, "B D"], new: Float[Array, "B D"], rows: RowStates
) -> Float[Array, "B D"]:
    return jnp.where(jnp.asarray(rows.active)[:, None], new, old)


def _read_window(
    model: LanguageModel,
    slots: Slots,
    tokens: Int[Array, "B W"],
    counts: Int[Array, "#B 1"] | Int[Array, ""],
    rows: RowStates,
    pages: tuple[Page, ...],
    sections: int,
) -> tuple[Float[Array, "B W D"], Slots]:
    """Runs the next tokens of all rows, and writes the first `counts` of active ones.

    The states of recurrent layers are those after all tokens, one per row.

    Returns:
      the state after each token, and the slots with the tokens read.
    """
    visible_sections, beyond = slots.own[:sections], slots.own[sections:]
    entries = jnp.asarray(rows.entry)
    with row_entries(entries):
        embedded = model.token_embedder(tokens, model.config.dtype)
    columns = jnp.asarray(rows.written)[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.asarray(rows.first)[:, None] + columns
    cross = ()
    if slots.cross is not None and slots.cross_mask is not None:
        cross = (Context(slots.cross.as_source(), slots.cross_mask[:, None, None]),)
    mask = None if tokens.shape[1] == 1 else masks.CausalMask(None)
    with row_entries(entries):
        hidden, kept = model.extend(
            Stream(embedded, positions, mask, active=rows.active_at(columns)),
            _with_state(
                [
                    *_page_contexts(pages, rows.visible),
                    *_own_contexts(
                        [own.as_source() for own in visible_sections],
                        rows.written,
                        rows.first,
                    ),
                ],
                slots.state,
            ),
            cross,
        )
    active = jnp.asarray(rows.active)[:, None]
    written = active & (jnp.arange(tokens.shape[1]) < counts)
    # Keys that are written after the blocks have read the old ones replace them in
    # place; otherwise the compiler would copy them.
    columns = _computed_after(columns, hidden)
    numbers = jnp.arange(len(tokens))[:, None]

    def write_section(own: BlockKeyValues, end: int) -> BlockKeyValues:
        within = columns - (end - own.length)
        # A column past the end is dropped.
        column = jnp.where(written & (within >= 0), within, own.length)  # [B, W]

        def write(buffer: Array, new: Array) -> Array:
            return buffer.at[:, numbers, column].set(new, mode="drop")

        return own.map(write, kept.key_values)

    updated = map(write_section, visible_sections, slots.section_ends)
    state = slots.state
    if state is not None and kept.state is not None:
        state = choose_rows(active[:, 0], kept.state, state)
    return hidden, dataclasses.replace(slots, own=(*updated, *beyond), state=state)


def _with_state(contexts: list[Context], state: RecurrentState | None) -> list[Context]:
    """Returns the contexts with a recurrent state after them."""
    if not contexts:  # of the first page of all, before which there is nothing
        return contexts
    return [*contexts[:-1], contexts[-1]._replace(state=state)]


def _computed_after(
    columns: Int[Array, "B W"], state: Float[Array, "B W D"]
) -> Int[Array, "B W"]:
    """Returns `columns`, but makes the compiler wait for `state` first.

    A barrier does not help: the compiler removes it before it decides what to copy.
    """
    bits = jax.lax.bitcast_convert_type(state[0, 0, 0].astype(jnp.float32), jnp.int32)
    # At least 2**30, whatever the bits.
    return jnp.minimum(columns, bits & 0x7FFFFFFF | 0x40000000)


@functools.partial(
    WeightedJit, static_argnames=("graph", "sections"), donate_argnames="slots"
)
def read_chunks(
    parameters: Parameters,
    slots: Slots,
    numbers: Integers,
    tokens: Integers | Float[Array, "R C D"] | Float[np.ndarray, "R C D"],
    counts: Integers,
    rows: RowStates,
    pages: tuple[Page, ...],
    starts: RecurrentState | None = None,
    *,
    graph: nnx.GraphDef,
    sections: int,
) -> tuple[Slots, Float[Array, "R C D"]]:
    """Reads the next chunk of each row's text into its slot.

    `numbers` has the slot of each row, `[R]`; a row may be repeated. The chunks are
    padded; instead of tokens they may be vectors, `[R, C, D]`. `starts` has the
    states of the recurrent layers after each row's prompt. See `read_tokens` for the
    other arguments.

    Returns:
      the slots, and the state after each token.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    chosen = jnp.asarray(numbers)
    visible_sections, beyond = slots.own[:sections], slots.own[sections:]
    past = [
        key_values.map(lambda part: part[:, chosen]).stacked()
        for key_values in visible_sections
    ]
    counts, state = jnp.asarray(counts), slots.state
    before = starts
    if state is not None and starts is not None:
        held = jax.tree.map(lambda part: part[:, chosen], state)
        before = choose_rows(jnp.asarray(rows.written) == 0, starts, held)
    hidden, kept = _run_chunks(model, tokens, counts, rows, pages, past, before)
    key_values = [
        write_rows(
            section, kept.key_values, chosen, rows.written - (end - section.length)
        )
        for section, end in zip(visible_sections, slots.section_ends, strict=False)
    ]
    if state is not None and kept.state is not None:
        state = replace_rows(state, kept.state, chosen)
    last = hidden[jnp.arange(len(hidden)), counts - 1]  # [R, D]
    slots = dataclasses.replace(
        slots,
        own=(*key_values, *beyond),
        hidden=slots.hidden.at[numbers].set(last),
        state=state,
    )
    return slots, hidden


@functools.partial(WeightedJit, static_argnames="graph")
def read_page(
    parameters: Parameters,
    tokens: Integers,
    count: Integers,
    row: RowStates,
    pages: tuple[Page, ...],
    state: RecurrentState | None = None,
    *,
    graph: nnx.GraphDef,
) -> tuple[Page, RecurrentState | None]:
    """Reads a part of a shared text into a page.

    The part, `[1, page]`, is padded. `row.first` is the position of its first token,
    and `row.visible` what it sees of `pages`. `state` is that of the recurrent layers
    after these.

    Returns:
      the page, and the state after it; None without recurrent layers.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    counts = jnp.asarray(count)
    _, kept = _run_chunks(model, tokens, counts, row, pages, (), state)
    return Page.create(kept.key_values, row.first[0]), kept.state


def _run_chunks(
    model: LanguageModel,
    tokens: Integers | Float[Array, "R C D"] | Float[np.ndarray, "R C D"],
    counts: Int[Array, "R"],
    rows: RowStates,
    pages: tuple[Page, ...],
    own: Sequence[KeyValues],
    state: RecurrentState | None,
) -> tuple[Float[Array, "R C D"], Kept]:
    """Runs chunks of rows after the keys and the state that they see."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim == 3:
        embedded = tokens.astype(model.config.dtype)
    else:
        with row_entries(jnp.asarray(rows.entry)):
            embedded = model.output_embedder(tokens, model.config.dtype)
    columns = jnp.asarray(rows.written)[:, None] + jnp.arange(tokens.shape[1])
    positions = jnp.asarray(rows.first)[:, None] + columns
    past = _page_contexts(pages, rows.visible, stacked=True)
    past += _own_contexts(own, rows.written, rows.first)
    with row_entries(jnp.asarray(rows.entry)):
        stream = Stream(
            embedded,
            positions,
            masks.CausalMask(None),
            lengths=counts,
            active=rows.active_at(columns),
        )
        return model.extend(stream, _with_state(past, state))


@functools.partial(jax.jit, donate_argnames="slots")
def copy_slot(slots: Slots, source: Integers, target: Integers) -> Slots:
    """Copies a row that has been read, but not continued, into another slot."""

    def copy(buffer: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(buffer, source, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(buffer, part, target, axis=1)

    sections = tuple(section.map(copy) for section in slots.own)
    cross, mask = slots.cross, slots.cross_mask
    if cross is not None and mask is not None:
        cross = cross.map(copy)
        mask = mask.at[target].set(mask[source])
    hidden = slots.hidden.at[target].set(slots.hidden[source])
    return Slots(sections, hidden, cross, mask, jax.tree.map(copy, slots.state))
