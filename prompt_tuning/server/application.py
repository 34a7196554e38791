"""The routes of the server."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request, separate_equal
from prompt_tuning.decoding.token_masks import RowMask
from prompt_tuning.server import openai_requests, prometheus
from prompt_tuning.server.beam_searches import BeamSearches
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.event_stream import (
    BodyReader,
    EventStream,
    check_completions,
    collect,
    error_of,
    json_response,
    unless_gone,
)
from prompt_tuning.server.fair_workers import FairWorkers
from prompt_tuning.server.openai_answers import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
)
from prompt_tuning.server.openai_requests import CommonBody
from prompt_tuning.server.request_fields import check_known
from prompt_tuning.server.request_guard import RequestGuard
from prompt_tuning.server.running_requests import RunningRequests, client_of
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.server_limits import (
    CONSTRAINED_BODY,
    CONSTRAINT_WORKERS,
    STOP_SECONDS,
    WAITING_CONSTRAINTS,
    RequestError,
)
from prompt_tuning.server.structured_outputs import has_constraint

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
Body = TypeVar("Body", bound=CommonBody)
GONE = 499
"""Status that is counted for a client that went away; nobody receives it."""


class ServerApplication:
    """Answers OpenAI's requests.

    Args:
      models: the models that are served.
      engine: engine that generates.
      queue_length: number of rows that may wait for a slot.
      samples: maximum of `n`.
      on_failure: called if the engine fails.
    """

    def __init__(
        self,
        models: ServedModels,
        engine: DecodingEngine,
        *,
        queue_length: int,
        samples: int,
        on_failure: Callable[[], Any] = lambda: None,
    ):
        self.models, self.engine = models, engine
        self.queue_length, self.samples = queue_length, samples
        self._on_failure = on_failure
        self._beams = BeamSearches(queue_length)
        self._bodies = BodyReader()
        self._constraints = FairWorkers(
            "compiling constraints", CONSTRAINT_WORKERS, WAITING_CONSTRAINTS
        )
        self._thread: EngineThread | None = None
        self._requests: RunningRequests | None = None

    def app(self, api_key: str | None = None, hosts: Sequence[str] = ()) -> ASGIApp:
        """Returns the ASGI application."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/embeddings", self._embeddings, methods=["POST"]),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]
        handlers = {
            InputError: _answer_error,
            RequestError: _answer_error,
            HTTPException: _answer_http,
            ClientDisconnect: _answer_gone,
            Exception: _answer_error,
        }
        app = Starlette(
            routes=routes, exception_handlers=handlers, lifespan=self._lifespan
        )
        self._requests = RunningRequests(RequestGuard(app, api_key, hosts))
        return self._requests

    def stop(self) -> None:
        """Refuses new requests, and ends those that run some seconds later."""
        self._running.refuse()
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._end)

    def _end(self) -> None:
        self.thread.end()
        self._running.end()

    @property
    def _running(self) -> RunningRequests:
        assert self._requests is not None
        return self._requests

    @property
    def busy(self) -> bool:
        """Whether a thread works that nobody waits for any more."""
        pools = (self._constraints, self._beams, self.models, self.thread)
        return any(each.busy for each in pools)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._thread = EngineThread(self.engine, self.queue_length, self._on_failure)
        try:
            yield
        finally:
            await self._thread.stop()

    @property
    def thread(self) -> EngineThread:
        """The thread of the engine, while the server runs."""
        assert self._thread is not None
        return self._thread

    # Pages about the server

    async def _page(self, request: HttpRequest) -> Response:
        del request
        return HTMLResponse(PAGE.read_text(), headers=PAGE_HEADERS)

    async def _health(self, request: HttpRequest) -> Response:
        del request
        await self.thread.metrics()
        return json_response({"status": "ok"})

    async def _metrics(self, request: HttpRequest) -> Response:
        del request
        metrics = await self.thread.metrics()
        text = prometheus.prometheus_text(metrics, self._running.statuses)
        return PlainTextResponse(
            text, headers={"Content-Type": prometheus.CONTENT_TYPE}
        )

    async def _list_models(self, request: HttpRequest) -> Response:
        del request
        entries = self.models.entries().items()
        data = [self._entry(name, entry.created) for name, entry in entries]
        return json_response({"object": "list", "data": data})

    async def _one_model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        self.models.adapter(name)
        created = self.models.entries()[name].created
        return json_response(self._entry(name, created))

    def _entry(self, name: str, created: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "prompt_tuning",
            "parent": None if name == self.models.name else self.models.name,
            "max_model_len": self.engine.limit,
        }

    # Adapters

    async def _load(self, request: HttpRequest) -> Response:
        body = openai_requests.read_body(await self._bodies.read(request))
        check_known(body, ("lora_name", "lora_path"), {})
        name, path = body.text("lora_name"), body.text("lora_path")
        await self.models.load(self.thread, name, path)
        return PlainTextResponse(f"adapter {shown(name)} is loaded")

    async def _unload(self, request: HttpRequest) -> Response:
        body = openai_requests.read_body(await self._bodies.read(request))
        check_known(body, ("lora_name", "lora_int_id"), {})
        name = body.text("lora_name")
        await self.models.unload(self.thread, name)
        return PlainTextResponse(f"adapter {shown(name)} is unloaded")

    # Generation

    async def _embeddings(self, request: HttpRequest) -> Response:
        del request
        raise RequestError("embeddings are not offered by this server", 404)

    async def _complete(self, request: HttpRequest) -> Response:
        content, client = await self._bodies.read(request), client_of(request)
        return await self._respond(request, self._read_completion(content, client))

    async def _read_completion(self, content: bytes, client: str) -> "_Work":
        """Reads the body of `/v1/completions`."""
        body = await self._read(content, openai_requests.read_completion, client)
        adapter = self._check(body)
        rows = [Request(embeddings=each) for each in body.embeddings]
        rows += [
            Request(ids=ids)
            for ids in await self._encode(body.prompts, adapter, client)
        ]
        common = {"adapter": adapter, "prompt_id": body.prompt_id, "client": client}
        requests = separate_equal(
            [dataclasses.replace(row, **common, sampling=body.sampling) for row in rows]
        )
        name = body.model or self.models.name
        form = CompletionFormat(name, self.models.tokenizer)
        return await self._work(body, requests, form, body.beams)

    async def _encode(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        adapter: str | None,
        client: str,
    ) -> Sequence[Sequence[int]]:
        """Returns the ids of prompts, which are all texts or all ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        limit = self.engine.limit
        if texts:
            return await self.models.encode_texts(texts, adapter, client, limit)
        rows = [prompt for prompt in prompts if not isinstance(prompt, str)]
        longest = max(map(len, rows), default=0)
        if longest > limit:
            raise InputError(
                f"a row of {longest:,} tokens is too long: a slot has {limit} positions"
            )
        return rows

    async def _chat(self, request: HttpRequest) -> Response:
        content, client = await self._bodies.read(request), client_of(request)
        return await self._respond(request, self._read_chat(content, client))

    async def _read_chat(self, content: bytes, client: str) -> "_Work":
        """Reads the body of `/v1/chat/completions`."""
        limit = self.engine.limit
        read = functools.partial(openai_requests.read_chat, room=limit)
        body = await self._read(content, read, client)
        adapter = self._check(body)
        ids, ends = await self.models.encode_chat(body.messages, adapter, client, limit)
        sampling = body.sampling
        if not sampling.ignores_end:
            sampling = dataclasses.replace(sampling, ends=(*sampling.ends, *ends))
        row = Request(
            ids=ids,
            adapter=adapter,
            prompt_id=body.prompt_id,
            sampling=sampling,
            client=client,
        )
        form = ChatFormat(body.model or self.models.name, self.models.tokenizer)
        return await self._work(body, [row], form)

    async def _read(
        self, content: bytes, read: Callable[[JsonObject], Body], client: str
    ) -> Body:
        """Reads a body; its constraint is compiled in a thread, which takes time."""
        body = openai_requests.read_body(content)
        if not has_constraint(body):
            return read(body)
        if len(content) > CONSTRAINED_BODY:
            raise InputError(
                f"the body has a constraint and {len(content):,} bytes, expected at "
                f"most {CONSTRAINED_BODY:,}"
            )
        return await self._constraints.run(client, functools.partial(read, body))

    async def _work(
        self,
        body: CommonBody,
        requests: Sequence[Request],
        form: AnswerFormat,
        beams: BeamSearch | None = None,
    ) -> "_Work":
        """Returns what is to be done; begins what takes time in other threads."""
        masks: list[RowMask | None] = [None] * len(requests)
        if body.sampling.constraint is not None and beams is None:

            def open_masks() -> list[RowMask | None]:
                return [self.engine.open_mask(request) for request in requests]

            masks = await self._constraints.run(requests[0].client, open_masks)
        return _Work(body.stream, body.usage, requests, masks, form, beams)

    async def _respond(
        self, request: HttpRequest, work: "Awaitable[_Work]"
    ) -> Response:
        """Generates, and answers at the end or piece by piece."""
        done = await unless_gone(request.receive, work)
        if done is None:
            return Response(status_code=GONE)
        if done.beams is not None:
            return await self._search(request, done, done.beams)
        generation = await self.thread.generate(done.requests, done.masks)
        if done.stream:
            return EventStream(generation, done.form, usage=done.usage)
        if not await collect(request.receive, generation):
            return Response(status_code=GONE)
        check_completions(generation.handles)
        return json_response(done.form.answer(generation.handles))

    async def _search(
        self, request: HttpRequest, work: "_Work", beams: BeamSearch
    ) -> Response:
        """Searches beams, and answers at the end."""
        if beams.beams > self.samples:
            raise InputError(
                f"best_of is {beams.beams}, expected 2 to {self.samples} beams"
            )
        if any(each.embeddings is not None for each in work.requests):
            raise InputError("beam search reads no prompt_embeds: send text")
        search = self._beams.search(self.thread, work.requests, beams)
        handles = await unless_gone(request.receive, search)
        if handles is None:
            return Response(status_code=GONE)
        return json_response(work.form.answer(handles))

    def _check(self, body: CommonBody) -> str | None:
        """Returns the adapter of a request."""
        if body.sampling.n > self.samples:
            raise InputError(f"n is {body.sampling.n}, expected 1 to {self.samples}")
        return self.models.adapter(body.model)


class _Work(NamedTuple):
    """A request that was read, with everything that needs no slot.

    Attributes:
      stream: whether the answer is a stream of events.
      usage: whether the stream ends with the numbers of tokens.
      requests: the rows.
      masks: results of `DecodingEngine.open_mask`.
      form: form of the answer.
      beams: settings of beam search, or None.
    """

    stream: bool
    usage: bool
    requests: Sequence[Request]
    masks: Sequence[RowMask | None]
    form: AnswerFormat
    beams: BeamSearch | None


async def _answer_error(request: HttpRequest, problem: Exception) -> Response:
    del request
    answer = error_of(problem)
    return json_response(answer.body(), answer.status)


async def _answer_http(request: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {shown(request.url.path)}: {problem.detail}"
    return await _answer_error(request, RequestError(message, problem.status_code))


async def _answer_gone(request: HttpRequest, problem: Exception) -> Response:
    del request, problem
    return Response(status_code=GONE)
