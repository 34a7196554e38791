"""Read tokens of rows into their slots on the device."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from prompt_tuning.decoding import slot_state
from prompt_tuning.decoding.given_scores import Scorer, scorer_of
from prompt_tuning.decoding.resident_adapters import ResidentAdapters
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import RowProgress
from prompt_tuning.decoding.slot_state import Integers, Page, RowStates, Slots
from prompt_tuning.decoding.slots import (
    copy_slot,
    read_chunks,
    read_guesses,
    read_tokens,
)
from prompt_tuning.decoding.token_choice import PerRow
from prompt_tuning.decoding.whole_rows import read_whole_rows
from prompt_tuning.models.recurrent_state import RecurrentState, join_rows

Placed = Sequence[tuple[int, RowProgress]]
"""Rows with their slot numbers."""

CHUNKS_PER_STEP = 4
"""Maximum number of chunks read between two steps of generating rows."""


class SlotReader:
    """The slots of an engine.

    Attributes:
      slots: arrays on the device.
      chunk: number of tokens of a row that are read in one go.

    Args:
      resident: the model and its adapters.
      count: number of slots.
      length: maximum number of tokens per row.
      together: number of rows whose texts are read together.
    """

    def __init__(
        self,
        resident: ResidentAdapters,
        count: int,
        length: int,
        chunk: int,
        together: int,
    ):
        self._resident, self._count, self.chunk = resident, count, chunk
        self._together, self._config = together, resident.model.config
        # Chunks begin at multiples of their size, and must not pass the end.
        self._sizes = count, -(-length // chunk) * chunk, chunk
        self._create_slots()
        recurrent = bool(self._config.recurrent_layers)
        self._no_state = RecurrentState.zeros(self._config, 1) if recurrent else None
        # The last row of each slot, and the order in which they started.
        self._texts: list[RowProgress | None] = [None] * count
        self._begun = list(range(count))

    def _create_slots(self) -> None:
        self._compressed = self._resident.compresses
        form = {"compressed": self._compressed}
        self.slots = Slots.create(self._config, *self._sizes, **form)
        self._no_page = Page.empty(self._config, self._resident.page, **form)

    def fit_to_adapters(self, *, runs: bool) -> None:
        """Compresses or expands keys and values after adapters have changed.

        Those of rows that run stay expanded if they are.
        """
        slots, compresses = self.slots, self._resident.compresses
        if compresses == self._compressed or (compresses and runs):
            return
        self._create_slots()
        if runs:
            bare = self._resident.find(None)
            self.slots = slot_state.expand_slots(
                bare.parameters, slots, graph=bare.model.graph
            )

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
            sections=self._sections(active, 1),
        )
        for _, row in active:
            row.written += 1

    def read_guesses(self, active: Placed, guesses: int) -> dict[int, list[int]]:
        """Reads each row's last token and guesses of the next ones.

        Returns the right guesses of each row, by slot.
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
            sections=self._sections(active, guesses + 1),
        )
        right = np.asarray(accepted)
        for slot, row in active:
            row.written += 1 + int(right[slot])
        return {slot: tokens[slot, 1 : 1 + right[slot]].tolist() for slot, _ in active}

    def compile(self, pages: int, guesses: int) -> list[str]:
        """Compiles the step for each number of pages and sections that it may read.

        Args:
          pages: number of pages of all prompts.
          guesses: number of guesses per step; 0 for none.
        """
        programs = []
        tokens = jnp.zeros(self._count, jnp.int32)
        windows = np.zeros((self._count, guesses + 1), np.int32)
        counts = np.zeros(self._count, np.int32)
        graph = self._resident.graph
        for count, (number, columns) in itertools.product(
            slot_state.page_counts(pages), enumerate(self.slots.section_ends)
        ):
            states = self._states((), np.zeros((self._count, count), np.int32))
            model = (self._resident.step_parameters, self.slots)
            others = (states, (self._no_page,) * count)
            settings: dict[str, Any] = {"graph": graph, "sections": number + 1}
            if guesses:
                self.slots, _ = read_guesses(
                    *model, windows, counts, *others, **settings
                )
            else:
                self.slots = read_tokens(*model, tokens, *others, **settings)
            programs.append(
                f"step of {self._count} rows with {count} pages, up to {columns} tokens"
            )
        return programs

    def read_texts(self, rows: Sequence[RowProgress | None], more: bool) -> None:
        """Reads chunks of texts; only a few while other rows wait for their step.

        With `more` rows waiting for a slot, reading only a few rows can wait for them.
        """
        generates = any(row is not None and row.ready for row in rows)
        for _ in range(CHUNKS_PER_STEP if generates else self._count):
            for slot, row in enumerate(rows):
                # A leader that was cancelled reads no more.
                if row and row.leader and not any(x is row.leader for x in rows):
                    self.start(slot, row, rows)
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
                self._serve_followers(rows, slot, row)

    # What rows have in common

    def forget(self) -> None:
        """Stops new rows from reusing what slots hold, because programs may change."""
        self._texts = [None] * self._count

    def oldest_first(self) -> list[int]:
        """Returns the slots, the earliest started text first."""
        return sorted(range(self._count), key=self._begun.__getitem__)

    def start(
        self, slot: int, row: RowProgress, rows: Sequence[RowProgress | None]
    ) -> None:
        """Lets a new row reuse the beginning of its text from another slot.

        The other row has read that beginning, or will. Only whole chunks are shared, so
        all keys have the same bits as if the row had read them itself.
        """
        shared = [
            self._common(row, other, runs=other is occupant)
            for other, occupant in zip(self._texts, rows, strict=True)
        ]
        source = max(range(self._count), key=shared.__getitem__)
        self._begun[slot] = max(self._begun) + 1
        leader, row.shared = self._texts[source], shared[source]
        self._texts[slot] = row
        row.leader = None
        if leader is not None and row.shared:
            if leader.ready or leader.written >= row.shared:
                self._take_over(source, leader, slot, row)
            else:
                row.leader = leader

    def _common(self, row: RowProgress, other: RowProgress | None, runs: bool) -> int:
        """Returns how many tokens a new row can take over from a slot's last row.

        `runs` tells whether that row is still running.
        """
        if other is None or other is row:
            return 0
        if runs and other.handle == row.handle and not other.ready:
            return max(len(row.given), 1)  # another sample
        if self._no_state is not None:
            return 0  # a slot has the state after its last token alone
        # Only whole chunks of given tokens are shared. Attention sums separately over
        # the keys before a chunk and those within it. If a row took over 11 tokens with
        # chunks of 8, the next chunk would have 11 keys before it, where a row read
        # from the first token has 8, and keys would differ in the last bits: in float32
        # they did in 16 of 16 trials, by up to 1e-6. Sharing more would save one chunk
        # at most. Keys of generated tokens, which are read one by one, differ too.
        size = self.chunk
        most = row.common_keys(other)
        most = min(most, len(other.given) if runs else other.written)
        if row.scores and not (other.scores and other.scores.covers(row.scores)):
            most = min(most, row.scores.first - 1)
        count = 0
        while count + size <= most and (
            row.given[count : count + size] == other.given[count : count + size]
        ):
            count += size
        return count

    def _take_over(
        self, source: int, leader: RowProgress, slot: int, row: RowProgress
    ) -> None:
        """Copies the beginning of a row that has been read into another row's slot."""
        if slot != source:
            self.slots = copy_slot(self.slots, np.int32(source), np.int32(slot))
        row.leader, row.first = None, leader.first
        if row.shared >= len(row.given):
            row.written, row.ready, row.scores = leader.written, True, leader.scores
            return
        row.written = row.shared
        if row.scores is not None and leader.scores is not None:
            row.scores.take_over(leader.scores, row.shared, self._scorer(row))

    def _scorer(self, row: RowProgress) -> Scorer:
        """Returns the scorer of a row's tokens; see `score_states`."""
        resident, entry = self._resident, self._resident.entry(row.adapter)
        return scorer_of(resident.parameters, resident.graph, entry)

    def entries(self, active: Placed) -> Integers:
        """Returns each slot's entry in the adapter tables."""
        return self._states(active, np.zeros((self._count, 0), np.int32)).entry

    def _serve_followers(
        self, rows: Sequence[RowProgress | None], slot: int, leader: RowProgress
    ) -> None:
        """Copies what a row has read to the rows that wait for it."""
        for other, row in enumerate(rows):
            if row is None or row.leader is not leader:
                continue
            if leader.ready or leader.written >= row.shared:
                self._take_over(slot, leader, other, row)
                if row.ready:
                    self._serve_followers(rows, other, row)

    def _kind(self, row: RowProgress) -> tuple[Any, ...]:
        """Returns a key that is equal for rows that can be read together."""
        if row.reads_whole:
            size = self.chunk
            while size < len(row.given):
                size *= 2
            return id(row.adapter), size
        return (row.embeddings is None,)

    def _read_part(self, chosen: Placed) -> None:
        """Reads the next chunk of rows, or whole rows where necessary."""
        # Missing rows repeat the last one, so that the shape is always the same.
        filled = [*chosen, *[chosen[-1]] * (self._together - len(chosen))]
        numbers = np.array([slot for slot, _ in filled], np.int32)
        if chosen[0][1].reads_whole:
            self._read_whole([row for _, row in filled], numbers)
            return
        pad, count = self._config.pad_id, len(filled)
        tokens = np.full((count, self.chunk), pad, np.int32)
        if chosen[0][1].embeddings is not None:
            shape = (count, self.chunk, self._config.width)
            tokens = np.zeros(shape, np.float32)
        counts = np.zeros(count, np.int32)
        for i, (_, row) in enumerate(filled):
            content = row.given if row.embeddings is None else row.embeddings
            part = content[row.written : row.written + self.chunk]
            tokens[i, : len(part)], counts[i] = part, len(part)
        placed = [(i, row) for i, (_, row) in enumerate(filled)]
        pages, visible = self._active_pages(placed, count)
        self.slots, hidden = read_chunks(
            self._resident.parameters,
            self.slots,
            numbers,
            tokens,
            counts,
            self._states(placed, visible),
            pages,
            join_rows([row.prompt.state for _, row in filled], self._no_state),
            graph=self._resident.graph,
            sections=self._sections(placed, self.chunk),
        )
        for i, (_, row) in enumerate(chosen):
            if row.scores is not None:
                row.scores.read(row.written, hidden, i, self._scorer(row))
            row.written += int(counts[i])
            row.ready = row.written == len(row.given)

    def _read_whole(self, rows: Sequence[RowProgress], numbers: np.ndarray) -> None:
        """Reads whole rows of one adapter, padded to a common length."""
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
        """Returns the pages that active rows see, and how many keys each row sees.

        Pages of one row stay in order.
        """
        columns: dict[int, int] = {}
        pages: list[Page] = []
        for _, row in active:
            for page in row.prompt.pages:
                if id(page.keys) not in columns:
                    columns[id(page.keys)] = len(pages)
                    pages.append(page)
        padded = slot_state.padded_pages(pages, self._no_page)
        visible = np.zeros((count, len(padded)), np.int32)
        for slot, row in active:
            for page, count in zip(row.prompt.pages, row.prompt.visible, strict=True):
                visible[slot, columns[id(page.keys)]] = count
        return padded, visible

    def _states(self, active: Placed, visible: np.ndarray) -> RowStates:
        slots = np.array([slot for slot, _ in active], int)
        numbers = np.zeros((4, len(visible)), np.int32)
        numbers[0, slots] = [row.written for _, row in active]
        numbers[1, slots] = [row.first for _, row in active]
        numbers[2, slots] = [self._resident.entry(row.adapter) for _, row in active]
        numbers[3, slots] = [row.active_from for _, row in active]
        marks = np.zeros(len(visible), bool)
        marks[slots] = True
        start = numbers[3] if self._resident.invokes else None
        return RowStates(numbers[0], numbers[1], marks, numbers[2], visible, start)

    def _sections(self, rows: Placed, new: int) -> int:
        """Returns the number of sections to read for rows and their new tokens."""
        longest = max(row.written for _, row in rows) + new
        ends = self.slots.section_ends
        return 1 + sum(end < longest for end in ends[:-1])
