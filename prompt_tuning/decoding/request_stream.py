"""Read results from an engine: as pieces of one request, or many in order."""

from collections import deque
from collections.abc import Iterable, Iterator

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Piece, Request, RequestHandle

UNFINISHED = 2
"""Number of unfinished rows per slot, so that no slot is idle."""
AHEAD = 32
"""Number of rows per slot that are submitted but not yet yielded; bounds the memory."""


def stream_request(engine: DecodingEngine, request: Request) -> Iterator[Piece]:
    """Submits a request, runs the engine, and yields the request's pieces.

    If the caller stops reading, the request is cancelled. Pieces of other requests are
    dropped, so read one stream at a time per thread.

    Raises:
      InputError: if the engine refuses the request; at the end, if its constraint
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
    """Yields the completions of each request in order, sorted by sample.

    Requests are read as slots become free, so `requests` may be of any length. If the
    caller stops reading, unfinished requests are cancelled.
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
