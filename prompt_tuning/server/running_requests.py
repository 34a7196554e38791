"""The running requests, which end when the server ends."""

import asyncio
from collections import Counter
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from prompt_tuning.server.engine_thread import STOPPING
from prompt_tuning.server.event_stream import error_of, json_response
from prompt_tuning.server.http_server import is_loopback
from prompt_tuning.server.server_limits import RequestError


class RunningRequests:
    """Passes requests on, and counts their answers by status.

    Attributes:
      statuses: number of answers by status.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._unanswered: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self.statuses: Counter[int] = Counter()

    def refuse(self) -> None:
        """Answers new requests with status 503."""
        self._stopping = True

    def end(self) -> None:
        """Answers all pending requests with status 503."""
        for task in self._unanswered:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes on another event."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return

        async def count(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
                self._unanswered.discard(task)
            await send(message)

        if self._stopping:
            await _refuse(scope, receive, count)
            return
        self._unanswered.add(task)
        try:
            await self._app(scope, receive, count)
        except asyncio.CancelledError:
            if not self._stopping or task not in self._unanswered:
                raise
            task.uncancel()
            await _refuse(scope, receive, count)
        finally:
            self._unanswered.discard(task)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_of(RequestError(STOPPING, 503, "server_error"))
    await json_response(answer.body(), answer.status)(scope, receive, send)


def client_of(request: HttpRequest) -> str:
    """Returns the client that takes a turn for a request: its address.

    On this machine, where all clients (and those of a proxy) share one address, each
    connection is a client instead.
    """
    host, port = request.client or ("", 0)
    return f"{host}:{port}" if is_loopback(host) else host
