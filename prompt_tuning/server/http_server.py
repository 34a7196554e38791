"""Run the application until a signal ends it."""

import asyncio
import contextlib
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

from prompt_tuning.core.interrupts import FirstOfSeveral
from prompt_tuning.server.connections import TimedConnection, connection_limit
from prompt_tuning.server.server_limits import CUT_SECONDS, LAST_SECONDS

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
