"""The routes of the server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.engine_metrics import EngineMetrics
from prompt_tuning.server import server_limits
from prompt_tuning.server.embedding_routes import EmbeddingRoutes
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.event_stream import error_response, json_response
from prompt_tuning.server.generation_routes import CLAMPED, GONE, GenerationRoutes
from prompt_tuning.server.running_requests import (
    RequestGuard,
    RequestReader,
    RunningRequests,
)
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.tokenizer_routes import TokenizerRoutes

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class ServerApplication:
    """Answers OpenAI's requests."""

    def __init__(
        self,
        models: ServedModels,
        engine: DecodingEngine,
        settings: server_limits.ServerSettings,
        on_failure: Callable[[], Any] = lambda: None,
    ):
        self.models, self.engine = models, engine
        self._settings, self._on_failure = settings, on_failure
        self._reader = RequestReader()
        self.generation = GenerationRoutes(
            models, engine, settings, lambda: self.thread, self._reader
        )
        self.embedding = EmbeddingRoutes(models, self._reader)
        self._tokens = TokenizerRoutes(models, self._reader)
        self._thread: EngineThread | None = None
        self._requests: RunningRequests | None = None

    def app(
        self,
        api_keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> ASGIApp:
        """Returns the ASGI application.

        Args:
          api_keys: keys, one of which a client must send; empty for an open server.
          hosts: accepted values of the `Host` header; empty for all.
          origins: origins of web pages that may read answers, or `*`.
        """
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/completions", self.generation.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.generation.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embedding.embed, methods=["POST"]),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
            *self._tokens.routes(),
        ]
        handlers = {
            InputError: _answer_error,
            server_limits.RequestError: _answer_error,
            HTTPException: _answer_http,
            ClientDisconnect: _answer_gone,
            Exception: _answer_error,
        }
        app = Starlette(
            routes=routes, exception_handlers=handlers, lifespan=self._lifespan
        )
        guarded: ASGIApp = RequestGuard(app, api_keys, hosts)
        if origins:
            # Outside of the guard, because browsers ask without the key first.
            guarded = CORSMiddleware(
                guarded,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[CLAMPED],
            )
        self._requests = RunningRequests(guarded)
        return self._requests

    def stop(self) -> None:
        """Refuses new requests, and ends running ones some seconds later."""
        self._running.refuse()
        asyncio.get_running_loop().call_later(server_limits.STOP_SECONDS, self._end)

    def _end(self) -> None:
        self.thread.end()
        self._running.end()

    @property
    def _running(self) -> RunningRequests:
        assert self._requests is not None
        return self._requests

    @property
    def busy(self) -> bool:
        """Whether a thread still works although nobody waits for its result."""
        pools = (self.generation, self.embedding, self.models, self.thread)
        return any(each.busy for each in pools)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._thread = EngineThread(
            self.engine, self._settings.queue_length, self._on_failure
        )
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
        text = prometheus_text(metrics, self._running.statuses)
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE})

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
            "max_model_len": self.models.limit,
        }

    # Adapters

    async def _load(self, request: HttpRequest) -> Response:
        body = await self._reader.fields(request, ("lora_name", "lora_path"))
        name, path = body.text("lora_name"), body.text("lora_path")
        await self.models.load(self.thread, name, path)
        return PlainTextResponse(f"adapter {shown(name)} is loaded")

    async def _unload(self, request: HttpRequest) -> Response:
        body = await self._reader.fields(request, ("lora_name", "lora_int_id"))
        name = body.text("lora_name")
        await self.models.unload(self.thread, name)
        return PlainTextResponse(f"adapter {shown(name)} is unloaded")


async def _answer_error(request: HttpRequest, problem: Exception) -> Response:
    del request
    return error_response(problem)


async def _answer_http(request: HttpRequest, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    message = f"{request.method} {shown(request.url.path)}: {problem.detail}"
    return await _answer_error(
        request, server_limits.RequestError(message, problem.status_code)
    )


async def _answer_gone(request: HttpRequest, problem: Exception) -> Response:
    del request, problem
    return Response(status_code=GONE)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "slots": ("gauge", "number of slots"),
    "active": ("gauge", "rows that generate"),
    "queued": ("gauge", "rows that wait for a slot"),
    "requests": ("counter", "requests submitted to the engine"),
    "finished": ("counter", "rows that ended by themselves"),
    "cancelled": ("counter", "rows whose client went away"),
    "given_tokens": ("counter", "tokens of submitted texts"),
    "new_tokens": ("counter", "generated tokens"),
    "tokens_per_second": ("gauge", "generated tokens per second, latest steps"),
    "first_token_seconds": ("gauge", "mean time to the first token, latest rows"),
    "key_value_bytes": ("gauge", "bytes of keys and values, used or not"),
}


def prometheus_text(metrics: EngineMetrics, statuses: Mapping[int, int]) -> str:
    """Returns the metrics of an engine and the counts of answers by status."""
    lines = []
    for name, (kind, text) in HELP.items():
        label = f"prompt_tuning_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {label} {text}", f"# TYPE {label} {kind}"]
        lines.append(f"{label} {getattr(metrics, name)}")
    label = "prompt_tuning_answers_total"
    lines += [f"# HELP {label} HTTP answers by status", f"# TYPE {label} counter"]
    lines += [f'{label}{{status="{x}"}} {n}' for x, n in sorted(statuses.items())]
    return "\n".join(lines) + "\n"
