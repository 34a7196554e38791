"""The queue of rows that wait for a slot of the engine."""

from collections.abc import Sequence

from prompt_tuning.core.fair_queue import FairQueue
from prompt_tuning.decoding.row_progress import RowProgress

SHORT = 32
"""Maximum number of new tokens of a short row."""


class RowQueue(FairQueue[RowProgress]):
    """A queue in which clients take turns and some slots are reserved for short rows.

    A short row therefore never waits for a long one to end.
    """

    def __init__(self, slots: int, kept: int):
        super().__init__()
        self._most = slots - kept

    def pop_for(self, running: Sequence[RowProgress | None]) -> RowProgress | None:
        """Removes and returns the next row for a free slot; None if all must wait."""
        long = sum(row is not None and not is_short(row) for row in running)
        return self.pop_if(is_short) if long >= self._most else self.pop()


def is_short(row: RowProgress) -> bool:
    """Whether a row generates few tokens."""
    return row.new_tokens <= SHORT
