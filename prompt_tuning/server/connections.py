"""Connections with time limits; idle ones make room for new ones."""

import contextlib
import heapq
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from prompt_tuning.server.server_limits import (
    BODY_SECONDS,
    HEADER_SECONDS,
    MAXIMUM_CONNECTIONS,
    OTHER_FILES,
    READ_SECONDS,
    SPARE_CONNECTIONS,
)

CLOSED = SPARE_CONNECTIONS // 2
"""Number of idle connections that are closed at a time."""
ANSWER_SECONDS = 5
"""Time for sending the error about a slow body before the connection is closed."""


def connection_limit() -> int:
    """Returns the maximum number of open connections.

    Raises the limit of this process for open files if allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAXIMUM_CONNECTIONS + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(min(soft, needed) - OTHER_FILES, 2 * SPARE_CONNECTIONS)
    return MAXIMUM_CONNECTIONS


class TimedConnection(H11Protocol):
    """A connection that closes if its client sends or reads too slowly.

    If too many are open, a new one closes those that have waited longest for the rest
    of a request, so clients that never send it cannot lock out others.
    """

    def connection_made(self, transport: Any) -> None:
        """Starts the connection; see `asyncio.Protocol`."""
        super().connection_made(transport)
        self._since = self._moved = time.monotonic()
        self._unread = 0
        limit = self.limit_concurrency or MAXIMUM_CONNECTIONS
        if len(self.connections) > limit - SPARE_CONNECTIONS:
            idle = [
                each
                for each in self.connections
                if isinstance(each, TimedConnection)
                and each is not self
                and each.waits_for_client
                and not each.transport.is_closing()
            ]
            # Close many together, because finding them takes time.
            count = min(CLOSED, -(-len(idle) // 2))
            for each in heapq.nsmallest(count, idle, key=lambda one: one._since):
                each.transport.abort()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        self._since = time.monotonic()
        super().on_response_complete()

    @property
    def waits_for_client(self) -> bool:
        """Whether the client has not yet sent its whole next request."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def check(self) -> None:
        """Closes the connection if its client is too slow."""
        now, cycle = time.monotonic(), self.cycle
        answered = cycle is None or cycle.response_complete
        longest = HEADER_SECONDS if answered else BODY_SECONDS + ANSWER_SECONDS
        size = self.transport.get_write_buffer_size()
        # While nothing is added, the buffer only shrinks if the client reads.
        adding = not (answered or self.flow.write_paused)
        if not size or size < self._unread or adding:
            self._moved = now
        self._unread = size
        slow = self.waits_for_client and now - self._since > longest
        if slow or now - self._moved > READ_SECONDS:
            self.transport.abort()
