"""Run the application until a signal ends it, with time limits for its clients."""

import asyncio
import contextlib
import heapq
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from prompt_tuning.core.interrupts import FirstOfSeveral
from prompt_tuning.server.server_limits import (
    BODY_SECONDS,
    CUT_SECONDS,
    HEADER_SECONDS,
    LAST_SECONDS,
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


ACCEPTED = 64
"""Number of new connections accepted before existing ones are served again."""
WAITING_CONNECTIONS = 2048
"""Number of new connections that the system queues."""
CHECK_SECONDS = 0.5
"""Time between checks of all connections."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""`Host` header values with which local clients address this machine."""


def open_socket(host: str, port: int) -> socket.socket:
    """Returns a bound socket that does not accept connections yet.

    Raises:
      OSError: if the address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as problem:
        opened.close()
        raise OSError(
            problem.errno, f"{problem.strerror}: --host {host} --port {port}"
        ) from problem
    return opened


def is_loopback(host: str) -> bool:
    """Whether only clients on this machine can reach an address."""
    return host.startswith("127.") or host in ("localhost", "::1")


def address_of(opened: socket.socket, *, encrypted: bool = False) -> str:
    """Returns the URL of a socket."""
    host, port = opened.getsockname()[:2]
    scheme = "https" if encrypted else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(uvicorn.Server):
    """A server that finishes running requests within a limited time when it ends.

    Args:
      app: application.
      on_start: called when the server starts to answer.
      on_stop: called in the event loop when it starts to end.
      leave: ends the process immediately with a code; called at a second signal, and if
        the process still runs `LAST_SECONDS` after the first.
      certificate: certificate file, for TLS; None for none.
      private_key: file of its key; None if it is in the same file.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_start: Callable[[], Any],
        on_stop: Callable[[], Any] = lambda: None,
        leave: Callable[[int], Any] = lambda code: None,
        certificate: Path | None = None,
        private_key: Path | None = None,
    ):
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            http=TimedConnection,
            limit_concurrency=connection_limit(),
            backlog=ACCEPTED,
            h11_max_incomplete_event_size=2**16,
            ws="none",
            interface="asgi3",
            proxy_headers=False,
            ssl_certfile=certificate,
            ssl_keyfile=private_key,
        )
        super().__init__(config)
        self._on_start, self._on_stop, self._leave = on_start, on_stop, leave
        self._signals, self._signalled = FirstOfSeveral(), False
        self._stopping: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends after the running requests, or immediately at the second signal."""
        if not self._signals.is_new():
            return
        code = 128 + sig
        if self._signalled:
            self.force_exit = True
            self._leave(code)
            return
        self._signalled = True
        last = threading.Timer(LAST_SECONDS, self._leave, [code])
        last.daemon = True
        last.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer requests."""
        await super().startup(sockets)
        if self.started:
            # asyncio accepts as many in a row as it lets wait.
            for one in sockets or []:
                one.listen(WAITING_CONNECTIONS)
            self._checks = asyncio.ensure_future(self._check_connections())
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends after the running requests."""
        self._stopping = time.monotonic()
        self._on_stop()
        try:
            await super().shutdown(sockets)
        finally:
            self._checks.cancel()

    async def _check_connections(self) -> None:
        """Closes connections of slow clients; at the end, closes all."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            begun = self._stopping
            cut = begun is not None and time.monotonic() - begun > CUT_SECONDS
            for connection in list(self.server_state.connections):
                if cut:
                    connection.transport.abort()
                elif isinstance(connection, TimedConnection):
                    connection.check()


@contextlib.contextmanager
def ending_by_signals() -> Iterator[None]:
    """Ignores the signals that uvicorn raises again after it has ended."""
    names = (signal.SIGTERM, signal.SIGINT)
    old_handlers = {name: signal.signal(name, lambda *_: None) for name in names}
    try:
        yield
    finally:
        for name, handler in old_handlers.items():
            signal.signal(name, handler)
