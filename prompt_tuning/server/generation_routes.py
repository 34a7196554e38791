"""The routes that generate: `/v1/completions` and `/v1/chat/completions`."""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.text.tokenizers import hidden_tokens
from prompt_tuning.decoding.adapter_table import PromptPages, ResidentAdapter
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import (
    Completion,
    Request,
    RequestHandle,
    separate_equal,
)
from prompt_tuning.decoding.request_checks import check_ids, fitting_tokens
from prompt_tuning.decoding.token_masks import RowMask
from prompt_tuning.server import event_stream, openai_requests, server_limits
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.fair_workers import FairWorkers
from prompt_tuning.server.openai_answers import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
)
from prompt_tuning.server.openai_requests import CommonBody, CompletionBody
from prompt_tuning.server.running_requests import RequestReader, client_of
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.structured_outputs import has_constraint

Body = TypeVar("Body", bound=CommonBody)
GONE = 499
"""Status counted for a disconnected client; nobody receives it."""
CLAMPED = "x-max-tokens-clamped"
"""Header with the number of new tokens that fit, if smaller than `max_tokens`."""


class GenerationRoutes:
    """Answers the requests that generate.

    `thread` returns the engine's thread while the server runs.
    """

    def __init__(
        self,
        models: ServedModels,
        engine: DecodingEngine,
        settings: server_limits.ServerSettings,
        thread: Callable[[], EngineThread],
        reader: RequestReader,
    ):
        self._models, self._engine, self._settings = models, engine, settings
        self._thread, self._reader = thread, reader
        self._beams = BeamSearches(settings.queue_length)
        self.constraints = FairWorkers(
            "compiling constraints",
            server_limits.CONSTRAINT_WORKERS,
            server_limits.WAITING_CONSTRAINTS,
        )

    @property
    def busy(self) -> bool:
        """Whether a thread still works although nobody waits for its result."""
        return self.constraints.busy or self._beams.busy

    async def complete(self, request: HttpRequest) -> Response:
        """Answers `/v1/completions`."""
        content, client = await self._reader.bodies.read(request), client_of(request)
        return await self._respond(request, self._read_completion(content, client))

    async def _read_completion(self, content: bytes, client: str) -> "_Work":
        room = self._models.limit
        read_body = functools.partial(openai_requests.read_completion, room=room)
        body = await self._read(content, read_body, client)
        adapter = self._check(body, client)
        rows = [Request(embeddings=each) for each in body.embeddings]
        rows += [Request(ids=ids) for ids in await self._encode(body, adapter, client)]
        common = self._common(body, adapter, client)
        requests = separate_equal([dataclasses.replace(row, **common) for row in rows])
        name = body.model or self._models.name
        form = CompletionFormat(name, self._models.tokenizer, body.given)
        return await self._work(body, requests, form, body.beams)

    async def _encode(
        self, body: CompletionBody, adapter: str | None, client: str
    ) -> Sequence[Sequence[int]]:
        """Returns the ids of prompts, all of which are texts or ids."""
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        limit, models = self._models.limit, self._models
        if texts and not body.special:
            return [await models.encode_plain(x, client) for x in texts]
        if texts:
            return await models.encode_texts(texts, adapter, client)
        rows = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
        longest = max(map(len, rows), default=0)
        if longest > limit:
            raise InputError(
                f"a row of {longest:,} tokens is too long: a slot has {limit} positions"
            )
        return rows

    async def chat(self, request: HttpRequest) -> Response:
        """Answers `/v1/chat/completions`."""
        content, client = await self._reader.bodies.read(request), client_of(request)
        return await self._respond(request, self._read_chat(content, client))

    async def _read_chat(self, content: bytes, client: str) -> "_Work":
        models = self._models
        read_body = functools.partial(openai_requests.read_chat, room=models.limit)
        body = await self._read(content, read_body, client)
        adapter = self._check(body, client)
        if body.tools is not None and body.sampling.constraint is not None:
            raise InputError(
                "the answer cannot match response_format or structured_outputs and "
                "call tools: leave out one of them"
            )
        conversation = body.conversation
        chat = await models.encode_chat(conversation, adapter, client, body.tools)
        sampling = body.sampling
        if not sampling.ignores_end:
            sampling = dataclasses.replace(sampling, ends=(*sampling.ends, *chat.ends))
        if chat.syntax.grammar is not None:
            constrain = functools.partial(
                dataclasses.replace, sampling, grammar=chat.syntax.grammar
            )
            sampling = await self.constraints.run(client, constrain)
        body = dataclasses.replace(body, sampling=sampling)
        common = self._common(body, adapter, client)
        common["written"] |= chat.syntax.written(models.tokenizer)
        row = Request(ids=chat.ids, **common)
        name = body.model or models.name
        form = ChatFormat(name, models.tokenizer, chat.syntax, body.given)
        return await self._work(body, [row], form)

    async def _read(
        self, content: bytes, read: Callable[[JsonObject], Body], client: str
    ) -> Body:
        """Reads a body; compiles its constraint in a thread, which takes time."""
        body = openai_requests.read_body(content)
        if not has_constraint(body):
            return read(body)
        if len(content) > server_limits.CONSTRAINED_BODY:
            raise InputError(
                f"the body has a constraint and {len(content):,} bytes, expected at "
                f"most {server_limits.CONSTRAINED_BODY:,}"
            )
        return await self.constraints.run(client, functools.partial(read, body))

    def _check(self, body: CommonBody, client: str) -> str | None:
        most = self._settings.samples
        if body.sampling.n > most:
            raise InputError(f"n is {body.sampling.n}, expected 1 to {most}")
        adapter = self._models.adapter(body.model)
        self._reader.unknown.note(body.unknown, client)
        return adapter

    def _common(
        self, body: CommonBody, adapter: str | None, client: str
    ) -> dict[str, Any]:
        """Returns the settings that all rows of a request share."""
        special = {} if body.skips_special else hidden_tokens(self._models.tokenizer)
        return {
            "written": {id: text for text, id in special.items()},
            "adapter": adapter,
            "prompt_id": body.prompt_id,
            "sampling": body.sampling,
            "client": client,
            "fits": body.asked is None or not self._settings.strict_length,
        }

    async def _work(
        self,
        body: CommonBody,
        requests: Sequence[Request],
        form: AnswerFormat,
        beams: BeamSearch | None = None,
    ) -> "_Work":
        """Returns the work of a request; starts its slow parts in other threads."""
        masks: list[RowMask | None] = [None] * len(requests)
        if body.sampling.constraint is not None and beams is None:

            def open_masks() -> list[RowMask | None]:
                return [self._engine.open_mask(request) for request in requests]

            masks = await self.constraints.run(requests[0].client, open_masks)
        return _Work(body, requests, masks, form, beams)

    async def _respond(
        self, request: HttpRequest, work: "Awaitable[_Work]"
    ) -> Response:
        """Generates, and answers at the end or piece by piece."""
        done = await event_stream.unless_gone(request.receive, work)
        if done is None:
            return Response(status_code=GONE)
        if done.beams is not None:
            return await self._search(request, done, done.beams)
        generation = await self._thread().generate(done.requests, done.masks)
        headers = _headers(done.body, generation.handles)
        if done.body.stream:
            usage = done.body.usage
            return event_stream.EventStream(
                generation, done.form, usage=usage, headers=headers
            )
        if not await event_stream.collect(request.receive, generation):
            return Response(status_code=GONE)
        event_stream.check_completions(generation.handles)
        # The tokens of long texts take time to name.
        answer = await asyncio.to_thread(done.form.answer, generation.handles)
        return event_stream.json_response(answer, headers=headers)

    async def _search(
        self, request: HttpRequest, work: "_Work", beams: BeamSearch
    ) -> Response:
        """Runs a beam search, and answers at the end."""
        if beams.beams > self._settings.samples:
            raise InputError(
                f"best_of is {beams.beams}, expected 2 to {self._settings.samples} "
                "beams"
            )
        if any(each.embeddings is not None for each in work.requests):
            raise InputError("beam search reads no prompt_embeds: send text")
        search = self._beams.search(self._thread(), work.requests, beams)
        handles = await event_stream.unless_gone(request.receive, search)
        if handles is None:
            return Response(status_code=GONE)
        headers = _headers(work.body, handles)
        return event_stream.json_response(work.form.answer(handles), headers=headers)


class _Work(NamedTuple):
    """A request that was read, with everything that needs no slot."""

    body: CommonBody
    requests: Sequence[Request]
    masks: Sequence[RowMask | None]
    form: AnswerFormat
    beams: BeamSearch | None


def _headers(body: CommonBody, handles: Sequence[RequestHandle]) -> dict[str, str]:
    """Returns headers that tell if fewer tokens fit than requested."""
    room = min(handle.new_tokens for handle in handles)
    if body.asked is None or room >= body.asked:
        return {}
    return {CLAMPED: str(room)}


class BeamSearches:
    """Beam searches, row by row in one more thread, while the engine goes on."""

    def __init__(self, queue_length: int):
        self._pool = FairWorkers("beam search", 1, queue_length)

    @property
    def busy(self) -> bool:
        """Whether a search runs."""
        return self._pool.busy

    async def search(
        self, thread: EngineThread, requests: Sequence[Request], settings: BeamSearch
    ) -> list[RequestHandle]:
        """Returns the requests with their continuations, best first.

        If the caller is cancelled, rows that have not started are skipped.

        Raises:
          InputError: if a row cannot be served.
          BusyError: if too many rows wait.
        """
        searches = await thread.call(
            lambda engine: [_check_row(engine, each, settings) for each in requests]
        )
        handles = []
        for request, (adapter, fitting) in zip(requests, searches, strict=True):
            search = functools.partial(_search_row, request, adapter, fitting)
            handle = RequestHandle(len(handles), request, fitting.new_tokens)
            handle.completions.extend(await self._pool.run(request.client, search))
            handles.append(handle)
        return handles


def _search_row(
    request: Request, adapter: ResidentAdapter, settings: BeamSearch
) -> list[Completion]:
    numbers = None if request.prompt_id is None else [request.prompt_id]
    (completions,) = search_beams(
        adapter.model, adapter.parameters, [request.ids or ()], settings, numbers
    )
    return completions


def _check_row(
    engine: DecodingEngine, request: Request, settings: BeamSearch
) -> tuple[ResidentAdapter, BeamSearch]:
    """Returns the adapter of a request, and settings with new tokens that fit."""
    adapter, ids = engine.find_adapter(request.adapter), request.ids or ()
    check_ids(ids, adapter)
    new_tokens = fitting_tokens(
        settings.new_tokens,
        len(ids),
        adapter,
        PromptPages(),
        engine.limit,
        fits=request.fits,
    )
    return adapter, dataclasses.replace(settings, new_tokens=new_tokens)
