"""Answers that end early when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.request import RequestHandle
from prompt_tuning.server.engine_thread import Generation
from prompt_tuning.server.openai_answers import AnswerFormat
from prompt_tuning.server.server_limits import (
    BODY_SECONDS,
    MAXIMUM_BODIES,
    MAXIMUM_BODY,
    SMALL_BODY,
    BusyError,
    RequestError,
)


def json_bytes(value: Any) -> bytes:
    """Returns JSON in ASCII, which can express any text, including surrogates."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with JSON."""
    return Response(json_bytes(value), status, headers, "application/json")


class BodyReader:
    """Reads request bodies within a common memory limit."""

    def __init__(self):
        self._held = 0

    async def read(self, request: HttpRequest) -> bytes:
        """Returns the body of a request.

        Raises:
          RequestError: if it is too long, too slow or not declared as JSON, or if too
            many other bodies are arriving.
        """
        _check_type(request)
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    content += part
                    self._held += len(part)
                    self._check(len(content))
        except TimeoutError:
            message = f"the body took longer than {BODY_SECONDS} s"
            raise RequestError(message, 408) from None
        finally:
            self._held -= len(content)
        return bytes(content)

    def _check(self, size: int) -> None:
        if size > MAXIMUM_BODY:
            raise RequestError(f"the body is longer than {MAXIMUM_BODY:,} bytes", 413)
        if self._held > MAXIMUM_BODIES and size > SMALL_BODY:
            raise BusyError("too many large bodies arrive at once: try again later")


def _check_type(request: HttpRequest) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Web pages of other sites cannot send this type without being asked first.
        raise RequestError("the Content-Type must be application/json", 415)


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """Returns the result of some work; None once the client has disconnected."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(receive: Receive, generation: Generation) -> bool:
    """Waits until all rows have ended; returns whether the client still waits.

    Raises:
      RequestError: if the engine fails or ends.
    """

    async def read() -> bool:
        async for _ in generation:
            pass
        return True

    try:
        return bool(await unless_gone(receive, read()))
    finally:
        generation.close()


def check_completions(handles: Sequence[RequestHandle]) -> None:
    """Checks that no row ended because its constraint allowed no token.

    Raises:
      InputError: with the first problem.
    """
    for completion in [each for handle in handles for each in handle.completions]:
        if completion.problem:
            raise InputError(completion.problem)


class EventStream(Response):
    """A stream of server-sent events, one per piece.

    With `usage`, it ends with an event with token counts.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        form: AnswerFormat,
        *,
        usage: bool,
        headers: Mapping[str, str],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]
        self._generation, self._form, self._usage = generation, form, usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the rows have ended or the client has disconnected."""
        del scope
        try:
            await unless_gone(receive, self._send(send))
        except OSError:
            pass  # the client has gone away
        finally:
            self._generation.close()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events():
            body = b"data: " + event + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        generation, form = self._generation, self._form
        requests = [each.request for each in generation.handles]
        try:
            # The tokens of long texts take time to decode.
            for event in await asyncio.to_thread(form.opening, requests):
                yield json_bytes(event)
            async for piece in generation:
                event = form.event(generation.row(piece), piece)
                if event is not None:
                    yield json_bytes(event)
                check_completions([piece.handle])
            if self._usage:
                yield json_bytes(form.usage_event(generation.handles))
        except (RequestError, InputError) as problem:
            yield json_bytes(error_body(problem)[0])
        yield b"[DONE]"


def error_body(problem: Exception) -> tuple[dict[str, Any], int]:
    """Returns a problem with a request in OpenAI's form, and the status."""
    message, kind, status = "an error of the server", "server_error", 500
    if isinstance(problem, RequestError):
        message, kind, status = str(problem), problem.kind, problem.status
    elif isinstance(problem, InputError):
        message, kind, status = str(problem), "invalid_request_error", 400
    error = {"message": message, "type": kind, "param": None, "code": status}
    return {"error": error}, status


def error_response(problem: Exception) -> Response:
    """Returns the answer to a problem with a request."""
    return json_response(*error_body(problem))
