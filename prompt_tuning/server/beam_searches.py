"""Beam searches of the server, in a thread apart from the engine's."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prompt_tuning.decoding.adapter_table import PromptPages, ResidentAdapter
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request, RequestHandle
from prompt_tuning.decoding.request_checks import check_ids, check_room
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.server_limits import BusyError


class BeamSearches:
    """Searches beams of one row after the other, while the engine goes on.

    Args:
      queue_length: number of rows that may wait.
    """

    def __init__(self, queue_length: int):
        self._queue_length = queue_length
        self._waiting = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="beams")

    async def search(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        settings: BeamSearch,
    ) -> list[RequestHandle]:
        """Returns the requests with their continuations, best first.

        Rows that are not begun are left out once the caller is cancelled.

        Raises:
          InputError: if a row cannot be served.
          BusyError: if too many rows wait.
        """
        adapters = await thread.call(
            lambda engine: [_check(engine, each, settings) for each in requests]
        )
        if self._waiting + len(requests) > self._queue_length + 1:
            raise BusyError(f"{self._waiting} rows wait for beams: try again later")
        self._waiting += len(requests)
        left = len(requests)
        handles = []
        try:
            for number, (request, adapter) in enumerate(
                zip(requests, adapters, strict=True)
            ):
                handle = RequestHandle(number, request)
                handle.completions.extend(await self._run(request, adapter, settings))
                handles.append(handle)
                left -= 1
                self._waiting -= 1
        finally:
            self._waiting -= left
        return handles

    async def _run(
        self, request: Request, adapter: ResidentAdapter, settings: BeamSearch
    ):
        def search():
            numbers = None if request.prompt_id is None else [request.prompt_id]
            (completions,) = search_beams(
                adapter.model,
                adapter.parameters,
                [request.ids or ()],
                settings,
                numbers,
            )
            return completions

        return await asyncio.get_running_loop().run_in_executor(self._worker, search)


def _check(
    engine: DecodingEngine, request: Request, settings: BeamSearch
) -> ResidentAdapter:
    """Returns the adapter of a request.

    Raises:
      InputError: if the request cannot be served.
    """
    adapter, ids = engine.find_adapter(request.adapter), request.ids or ()
    check_ids(ids, adapter)
    check_room(len(ids), adapter, PromptPages(), settings.new_tokens, engine.limit)
    return adapter
