"""Reads tokens of rows into their slots on the device."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from prompt_tuning.decoding.resident_adapters import ResidentAdapters
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import RowProgress
from prompt_tuning.decoding.slot_state import Page, RowStates, Slots
from prompt_tuning.decoding.slots import (
    copy_slot,
    read_chunks,
    read_guesses,
    read_tokens,
    read_whole_rows,
)
from prompt_tuning.decoding.token_choice import PerRow
from prompt_tuning.models.attention import KeyValues

Placed = Sequence[tuple[int, RowProgress]]
"""Rows with the numbers of their slots."""

CHUNKS_PER_STEP = 4
"""Maximum number of chunks that are read between two steps of rows that generate."""


class SlotReader:
    """The slots of an engine.

    Attributes:
      slots: what the device holds.

    Args:
      resident: the model and its adapters.
      count: number of slots.
      length: maximum number of tokens of a row.
      chunk: number of tokens of a row that are read at once.
      together: number of rows whose texts are read at once.
    """

    def __init__(
        self,
        resident: ResidentAdapters,
        count: int,
        length: int,
        chunk: int,
        together: int,
    ):
        self._resident, self._count, self._chunk = resident, count, chunk
        self._together = together
        self._config = resident.model.config
        # Chunks begin at multiples of their size, and must not pass the end.
        self.slots = Slots.create(self._config, count, -(-length // chunk) * chunk)
        self._no_page = self._empty_page(resident.page)

    def read_tokens(self, active: Placed, tokens: PerRow) -> None:
        """Reads the next token of each active row."""
        pages, visible = self._active_pages(active, self._count)
        self.slots = read_tokens(
            self._resident.step_parameters,
            self.slots,
            tokens,
            self._states(active, visible),
            pages,
            graph=self._resident.graph,
        )
        for _, row in active:
            row.written += 1

    def read_guesses(self, active: Placed, guesses: int) -> dict[int, list[int]]:
        """Reads the last token of each row, and guesses of the next ones.

        Args:
          active: the rows.
          guesses: maximum number of guesses of a row.

        Returns:
          the right guesses of each row, by its slot.
        """
        tokens = np.zeros((self._count, guesses + 1), np.int32)
        counts = np.zeros(self._count, np.int32)
        for slot, row in active:
            window = [row.tokens[-1], *row.guess(guesses)]
            tokens[slot, : len(window)], counts[slot] = window, len(window)
        pages, visible = self._active_pages(active, self._count)
        self.slots, accepted = read_guesses(
            self._resident.step_parameters,
            self.slots,
            tokens,
            counts,
            self._states(active, visible),
            pages,
            graph=self._resident.graph,
        )
        right = np.asarray(accepted)
        for slot, row in active:
            row.written += 1 + int(right[slot])
        return {slot: tokens[slot, 1 : 1 + right[slot]].tolist() for slot, _ in active}

    def compile(self, pages: int, guesses: int) -> list[str]:
        """Compiles the step for each number of pages that rows may see.

        Args:
          pages: number of pages of all prompts.
          guesses: number of guesses of a step; 0 for none.

        Returns:
          a description of each program.
        """
        programs = []
        for count in _page_counts(pages):
            visible = np.zeros((self._count, count), np.int32)
            states = self._states((), visible)
            model = (self._resident.step_parameters, self.slots)
            others = (states, (self._no_page,) * count)
            graph = self._resident.graph
            if guesses:
                tokens = np.zeros((self._count, guesses + 1), np.int32)
                counts = np.zeros(self._count, np.int32)
                self.slots, _ = read_guesses(
                    *model, tokens, counts, *others, graph=graph
                )
            else:
                tokens = jnp.zeros(self._count, jnp.int32)
                self.slots = read_tokens(*model, tokens, *others, graph=graph)
            programs.append(f"step of {self._count} rows with {count} pages")
        return programs

    def row_lengths(self, limit: int) -> list[int]:
        """Returns the lengths to which whole rows are padded, up to a limit."""
        lengths = [min(self._chunk, limit)]
        while lengths[-1] < limit:
            lengths.append(min(2 * lengths[-1], limit))
        return lengths

    def read_texts(self, rows: Sequence[RowProgress | None], more: bool) -> None:
        """Reads chunks of texts, only a few while other rows wait for their step.

        Args:
          rows: the row in each slot.
          more: whether further rows wait for a slot, so that a reading of few rows can
            wait for them too.
        """
        generates = any(row is not None and row.ready for row in rows)
        for _ in range(CHUNKS_PER_STEP if generates else self._count):
            waiting = [
                (slot, row)
                for slot, row in enumerate(rows)
                if row is not None and not row.ready and row.leader is None
            ]
            if not waiting or (generates and more and len(waiting) < self._together):
                return
            kind = self._kind(waiting[0][1])
            chosen = [each for each in waiting if self._kind(each[1]) == kind]
            chosen = chosen[: self._together]
            self._read_part(chosen)
            for slot, row in chosen:
                if row.ready:
                    self._start_followers(rows, slot, row)

    def _start_followers(
        self, rows: Sequence[RowProgress | None], slot: int, source: RowProgress
    ) -> None:
        """Copies a row that was read to the slots of its other samples."""
        for other, row in enumerate(rows):
            if row is not None and row.leader == slot and row.handle == source.handle:
                self.slots = copy_slot(self.slots, np.int32(slot), np.int32(other))
                row.written, row.first = source.written, source.first
                row.ready, row.leader = True, None

    def _kind(self, row: RowProgress) -> tuple[Any, ...]:
        """Returns what rows that are read together have in common."""
        if row.reads_whole:
            size = self._chunk
            while size < len(row.given):
                size *= 2
            return id(row.adapter), size
        return (row.embeddings is None,)

    def _read_part(self, chosen: Placed) -> None:
        """Reads the next chunk of rows, or rows whole where they must be."""
        # Rows that are missing repeat the last one, so that the shape is always the
        # same.
        filled = [*chosen, *[chosen[-1]] * (self._together - len(chosen))]
        numbers = np.array([slot for slot, _ in filled], np.int32)
        if chosen[0][1].reads_whole:
            self._read_whole([row for _, row in filled], numbers)
            return
        pad, count = self._config.pad_id, len(filled)
        tokens = np.full((count, self._chunk), pad, np.int32)
        if chosen[0][1].embeddings is not None:
            shape = (count, self._chunk, self._config.width)
            tokens = np.zeros(shape, np.float32)
        counts = np.zeros(count, np.int32)
        for i, (_, row) in enumerate(filled):
            given = row.given if row.embeddings is None else row.embeddings
            part = given[row.written : row.written + self._chunk]
            tokens[i, : len(part)], counts[i] = part, len(part)
        placed = [(i, row) for i, (_, row) in enumerate(filled)]
        pages, visible = self._active_pages(placed, count)
        self.slots = read_chunks(
            self._resident.parameters,
            self.slots,
            numbers,
            tokens,
            counts,
            self._states(placed, visible),
            pages,
            graph=self._resident.graph,
        )
        for i, (_, row) in enumerate(chosen):
            row.written += int(counts[i])
            row.ready = row.written == len(row.given)

    def _read_whole(self, rows: Sequence[RowProgress], numbers: np.ndarray) -> None:
        """Reads whole rows of one adapter, padded to one length."""
        _, size = self._kind(rows[0])
        adapter = rows[0].adapter
        tokens, lengths = pad_rows([x.given for x in rows], self._config.pad_id, size)
        prompt_ids = None
        if rows[0].handle.request.prompt_id is not None:
            prompt_ids = np.array([x.handle.request.prompt_id for x in rows], np.int32)
        self.slots, written, first = read_whole_rows(
            adapter.parameters,
            self.slots,
            numbers,
            tokens,
            lengths,
            prompt_ids,
            graph=adapter.model.graph,
        )
        numbers_of_keys, positions = np.asarray(written), np.asarray(first)
        for i, row in enumerate(rows):
            row.written, row.first = int(numbers_of_keys[i]), int(positions[i])
            row.ready = True

    def _active_pages(
        self, active: Placed, count: int
    ) -> tuple[tuple[Page, ...], np.ndarray]:
        """Returns the pages that active rows see, and how much each row sees of each.

        Pages of one row stay in their order.
        """
        columns: dict[int, int] = {}
        pages: list[Page] = []
        for _, row in active:
            for page in row.prompt.pages:
                if id(page.keys) not in columns:
                    columns[id(page.keys)] = len(pages)
                    pages.append(page)
        padded = _padded(pages, self._no_page)
        visible = np.zeros((count, len(padded)), np.int32)
        for slot, row in active:
            for page, count in zip(row.prompt.pages, row.prompt.visible, strict=True):
                visible[slot, columns[id(page.keys)]] = count
        return padded, visible

    def _states(self, active: Placed, visible: np.ndarray) -> RowStates:
        slots = np.array([slot for slot, _ in active], int)
        numbers = np.zeros((3, len(visible)), np.int32)
        numbers[0, slots] = [row.written for _, row in active]
        numbers[1, slots] = [row.first for _, row in active]
        numbers[2, slots] = [self._resident.entry(row.adapter) for _, row in active]
        marks = np.zeros(len(visible), bool)
        marks[slots] = True
        return RowStates(numbers[0], numbers[1], marks, numbers[2], visible)

    def _empty_page(self, page: int) -> Page:
        config = self._config
        shape = (config.layers, config.key_value_heads, 1, page, config.head_width)
        zeros = jnp.zeros(shape, config.dtype)
        return Page.create(KeyValues(zeros, zeros), 0)


def _page_counts(largest: int) -> list[int]:
    """Returns the numbers of pages that programs are compiled for: 0, 1, 2, 4, ..."""
    counts = [0]
    while counts[-1] < largest:
        counts.append(max(2 * counts[-1], 1))
    return counts


def _padded(pages: Sequence[Page], empty: Page) -> tuple[Page, ...]:
    """Pads pages to one of few numbers."""
    count = _page_counts(len(pages))[-1]
    return (*pages, *[empty] * (count - len(pages)))
