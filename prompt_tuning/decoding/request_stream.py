"""Results as callers of an engine read them: pieces of one, or many in their order."""

from collections import deque
from collections.abc import Iterable, Iterator

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Piece, Request, RequestHandle

UNFINISHED = 2
"""Rows that are submitted and have not ended, for each slot, so that none is idle."""
AHEAD = 32
"""Rows that are submitted and not yielded, for each slot: the bound of the memory."""


def stream_request(engine: DecodingEngine, request: Request) -> Iterator[Piece]:
    """Submits a request, steps, and yields its pieces until it has ended.

    If its caller stops reading, a request is cancelled. Pieces of other requests are
    left out, so that one thread should read one stream at a time.

    Raises:
      InputError: if the engine refuses the request, or at the end if a constraint
        leaves a row no token.
    """
    handle = engine.submit(request)
    try:
        while not handle.finished:
            for piece in engine.step():
                if piece.handle == handle:
                    yield piece
        for completion in handle.completions:
            if completion.problem:
                raise InputError(completion.problem)
    finally:
        if not handle.finished:
            engine.cancel(handle)


def run_in_order(
    engine: DecodingEngine, requests: Iterable[Request]
) -> Iterator[list[Completion]]:
    """Yields the completions of each request, sorted by sample, in their order.

    Requests are read as slots become free, so that there may be any number of them.
    Those that have not ended when the caller stops reading are cancelled.

    Raises:
      InputError: if the engine refuses a request.
    """
    source = iter(requests)
    handles: deque[RequestHandle] = deque()
    submitted = unfinished = 0
    more = True
    try:
        while more or handles:
            room = unfinished < UNFINISHED * engine.count
            if more and room and submitted < AHEAD * engine.count:
                request = next(source, None)
                if request is None:
                    more = False
                    continue
                handles.append(engine.submit(request))
                submitted += request.sampling.n
                unfinished += request.sampling.n
            elif handles[0].finished:
                handle = handles.popleft()
                submitted -= handle.request.sampling.n
                yield sorted(handle.completions, key=lambda each: each.sample)
            else:
                pieces = engine.step()
                unfinished -= sum(piece.completion is not None for piece in pieces)
    finally:
        for handle in handles:
            if not handle.finished:
                engine.cancel(handle)
