"""Reads tokens of rows into their slots on the device."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from prompt_tuning.decoding.resident_adapters import ResidentAdapters
from prompt_tuning.decoding.row_progress import RowProgress
from prompt_tuning.decoding.slot_state import Page, RowStates, Slots
from prompt_tuning.decoding.slots import (
    copy_slot,
    read_chunk,
    read_guesses,
    read_row,
    read_tokens,
)
from prompt_tuning.decoding.token_choice import PerRow
from prompt_tuning.models.attention import KeyValues

Placed = Sequence[tuple[int, RowProgress]]
"""Rows with the numbers of their slots."""


class SlotReader:
    """The slots of an engine.

    Attributes:
      slots: what the device holds.

    Args:
      resident: the model and its adapters.
      count: number of slots.
      length: maximum number of tokens of a row.
      chunk: number of tokens of a row that are read at once.
    """

    def __init__(self, resident: ResidentAdapters, count: int, length: int, chunk: int):
        self._resident, self._count, self._chunk = resident, count, chunk
        self._config = resident.model.config
        # Chunks begin at multiples of their size, and must not pass the end.
        self.slots = Slots.create(self._config, count, -(-length // chunk) * chunk)
        self._no_page = self._empty_page(resident.page)

    def read_tokens(self, active: Placed, tokens: PerRow) -> None:
        """Reads the next token of each active row."""
        pages, visible = self._active_pages(active)
        self.slots = read_tokens(
            self._resident.parameters,
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
        pages, visible = self._active_pages(active)
        self.slots, accepted = read_guesses(
            self._resident.parameters,
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

    def copy(self, source: int, target: int) -> None:
        """Copies a row that was read and not continued into another slot."""
        self.slots = copy_slot(self.slots, np.int32(source), np.int32(target))

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
            model = (self._resident.parameters, self.slots)
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

    def read_part(self, slot: int, row: RowProgress) -> None:
        """Reads the next chunk of a row, or the row whole where it must be."""
        pad = self._config.pad_id
        if row.reads_whole:
            size = self._chunk
            while size < len(row.given):
                size *= 2
            tokens = np.full((1, size), pad, np.int32)
            tokens[0, : len(row.given)] = row.given
            number = row.handle.request.prompt_id
            self.slots, written, first = read_row(
                row.adapter.parameters,
                self.slots,
                np.int32(slot),
                tokens,
                np.array([len(row.given)], np.int32),
                None if number is None else np.array([number], np.int32),
                graph=row.adapter.model.graph,
            )
            row.written, row.first, row.ready = int(written), int(first), True
            return
        stop = min(row.written + self._chunk, len(row.given))
        part: Sequence[int] | np.ndarray = row.given[row.written : stop]
        tokens = np.full((1, self._chunk), pad, np.int32)
        if row.embeddings is not None:
            part = row.embeddings[row.written : stop]
            tokens = np.zeros((1, self._chunk, part.shape[1]), np.float32)
        tokens[0, : len(part)] = part
        pages = _padded(row.prompt.pages, self._no_page)
        visible = np.zeros((1, len(pages)), np.int32)
        visible[0, : len(row.prompt.visible)] = row.prompt.visible
        self.slots = read_chunk(
            self._resident.parameters,
            self.slots,
            np.int32(slot),
            tokens,
            np.int32(len(part)),
            self._row_state(row, visible),
            pages,
            graph=self._resident.graph,
        )
        row.written += len(part)
        row.ready = row.written == len(row.given)

    def _row_state(self, row: RowProgress, visible: np.ndarray) -> RowStates:
        return RowStates(
            np.array([row.written], np.int32),
            np.array([row.first], np.int32),
            np.array([True]),
            np.array([self._resident.entry(row.adapter)], np.int32),
            visible,
        )

    def _active_pages(self, active: Placed) -> tuple[tuple[Page, ...], np.ndarray]:
        """Returns the pages that active rows see, and how much each row sees of each.

        Pages of one row stay in their order.
        """
        columns: dict[int, int] = {}
        pages: list[Page] = []
        for _, row in active:
            for page in row.prompt.pages:
                if id(page.key_values) not in columns:
                    columns[id(page.key_values)] = len(pages)
                    pages.append(page)
        padded = _padded(pages, self._no_page)
        visible = np.zeros((self._count, len(padded)), np.int32)
        for slot, row in active:
            for page, count in zip(row.prompt.pages, row.prompt.visible, strict=True):
                visible[slot, columns[id(page.key_values)]] = count
        return padded, visible

    def _states(self, active: Placed, visible: np.ndarray) -> RowStates:
        numbers = np.zeros((3, self._count), np.int32)
        marks = np.zeros(self._count, bool)
        for slot, row in active:
            numbers[:, slot] = row.written, row.first, self._resident.entry(row.adapter)
            marks[slot] = True
        return RowStates(numbers[0], numbers[1], marks, numbers[2], visible)

    def _empty_page(self, page: int) -> Page:
        config = self._config
        shape = (config.layers, config.key_value_heads, 1, page, config.head_width)
        zeros = jnp.zeros(shape, config.dtype)
        return Page(KeyValues(zeros, zeros), jnp.array(0))


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
