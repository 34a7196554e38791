"""Which requests are answered, and the running ones, which end with the server."""

import asyncio
import hashlib
import hmac
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.server.engine_thread import STOPPING
from prompt_tuning.server.event_stream import BodyReader, error_response
from prompt_tuning.server.http_server import is_loopback
from prompt_tuning.server.openai_requests import read_body
from prompt_tuning.server.request_fields import Changing, UnknownFields, check_known
from prompt_tuning.server.server_limits import RequestError

OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page, which has no data, and the health check."""


class RequestGuard:
    """Refuses requests without a key, and requests to the wrong host name.

    Args:
      app: application that answers all other requests.
      api_keys: keys, one of which a client must send; empty for an open server.
      hosts: accepted values of the `Host` header; empty for all. On a loopback address,
        another name means that a web page tries to reach this machine.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], hosts: Sequence[str]):
        self._app, self._hosts = app, tuple(hosts)
        self._keys = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers refused requests, and passes on all others."""
        if scope["type"] == "http":
            problem = self._problem(scope["path"], Headers(scope=scope))
            if problem is not None:
                await error_response(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, path: str, headers: Headers) -> RequestError | None:
        host = headers.get("host", "").rpartition("@")[2]
        name = host.partition("]")[0] + "]" if "[" in host else host.partition(":")[0]
        if self._hosts and name.lower() not in self._hosts:
            return RequestError("the Host header names another machine", 403)
        if not self._keys or path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Digests have one length, and their comparison takes a constant time.
        sent = _digest(given.strip())
        right = any([hmac.compare_digest(sent, key) for key in self._keys])
        if scheme.lower() == "bearer" and right:
            return None
        return RequestError(
            "the API key is missing or wrong: send Authorization: Bearer KEY",
            401,
            "authentication_error",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


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
    problem = RequestError(STOPPING, 503, "server_error")
    await error_response(problem)(scope, receive, send)


class RequestReader:
    """Reads requests within a common memory limit, and logs their unknown fields.

    Attributes:
      bodies: reads their bodies.
      unknown: logs unknown fields.
    """

    def __init__(self):
        self.bodies, self.unknown = BodyReader(), UnknownFields()

    async def fields(
        self,
        request: HttpRequest,
        known: Sequence[str],
        changing: Mapping[str, Changing] = types.MappingProxyType({}),
    ) -> JsonObject:
        """Returns the body of a request with some known fields; see `check_known`."""
        body = read_body(await self.bodies.read(request))
        self.unknown.note(check_known(body, known, changing), client_of(request))
        return body


def client_of(request: HttpRequest) -> str:
    """Returns the client that takes a turn for a request: its address.

    On this machine, where all clients (and those of a proxy) share one address, each
    connection is a client instead.
    """
    host, port = request.client or ("", 0)
    return f"{host}:{port}" if is_loopback(host) else host
