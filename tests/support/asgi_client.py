"""A client of an ASGI application in the same process, without a network."""

import asyncio
from typing import Any

from starlette.types import ASGIApp


class AsgiClient:
    """Sends requests to an application, whose lifespan begins at once.

    Args:
      app: the application.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._runner = asyncio.Runner()
        self._runner.run(self._start())

    async def _start(self) -> None:
        started, self._closing = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not started.is_set():
                return {"type": "lifespan.startup"}
            await self._closing.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            assert message["type"].endswith(".complete"), message
            started.set()

        self._lifespan = asyncio.ensure_future(
            self._app({"type": "lifespan"}, receive, send)
        )
        await started.wait()

    def post(self, path: str, content: bytes) -> tuple[int, bytes]:
        """Returns the status and the content of the answer to a body of JSON."""
        return self._runner.run(self._post(path, content))

    async def _post(self, path: str, content: bytes) -> tuple[int, bytes]:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": content})
        answer: list[Any] = []

        async def send(message: Any) -> None:
            answer.append(message)

        await self._app(scope, messages.get, send)
        start, *parts = answer
        return start["status"], b"".join(part.get("body", b"") for part in parts)

    def close(self) -> None:
        """Ends the lifespan."""

        async def end() -> None:
            self._closing.set()
            await self._lifespan

        self._runner.run(end())
        self._runner.close()
