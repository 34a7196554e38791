"""Check each HTTP request before its body is read."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from prompt_tuning.server.event_stream import error_of, json_response
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
                answer = error_of(problem)
                response = json_response(answer.body(), answer.status)
                await response(scope, receive, send)
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
