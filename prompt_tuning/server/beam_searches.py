"""Beam searches of the server, in a thread of their own."""

import dataclasses
import functools
from collections.abc import Sequence

from prompt_tuning.decoding.adapter_table import PromptPages, ResidentAdapter
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Request, RequestHandle
from prompt_tuning.decoding.request_checks import check_ids, fitting_tokens
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.fair_workers import FairWorkers


class BeamSearches:
    """Searches row by row while the engine goes on."""

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
            lambda engine: [_check(engine, each, settings) for each in requests]
        )
        handles = []
        for request, (adapter, fitting) in zip(requests, searches, strict=True):
            search = functools.partial(_search, request, adapter, fitting)
            handle = RequestHandle(len(handles), request, fitting.new_tokens)
            handle.completions.extend(await self._pool.run(request.client, search))
            handles.append(handle)
        return handles


def _search(
    request: Request, adapter: ResidentAdapter, settings: BeamSearch
) -> list[Completion]:
    numbers = None if request.prompt_id is None else [request.prompt_id]
    (completions,) = search_beams(
        adapter.model, adapter.parameters, [request.ids or ()], settings, numbers
    )
    return completions


def _check(
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
