"""Continue requests with an engine where possible, otherwise in batches.

On one device, requests run in the slots of an engine, each with its own adapter and
settings. On a mesh or with streamed weights they run batch by batch with the model as
it is.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.status_line import status
from prompt_tuning.decoding.continue_rows import continue_rows, runs_in_slots
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Piece, Request, RequestHandle
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.texts.loaded_adapter import LoadedAdapter

BATCHES = 8
"""Number of batches whose rows are sorted by length together."""


def continue_requests(
    requests: Iterable[Request],
    own: LoadedAdapter,
    engine: Callable[[], DecodingEngine],
    batch_size: int,
) -> Iterator[list[Completion]]:
    """Yields the completions of each request, in order.

    `own` is the model with what its run trained. `engine` opens an engine with the
    adapters of all requests; `batch_size` applies when there is no engine.

    Raises:
      InputError: if a request cannot be continued, or needs an engine that the model
        does not support.
    """
    if runs_in_slots(own.model):
        yield from run_in_order(engine(), requests)
        return
    for sampling, equal in itertools.groupby(requests, lambda each: each.sampling):
        while part := list(itertools.islice(equal, BATCHES * batch_size)):
            for completion in _in_batches(part, own, sampling, batch_size):
                yield [completion]


def stream_text(
    request: Request, own: LoadedAdapter, engine: Callable[[], DecodingEngine]
) -> Iterator[str]:
    """Yields the text of one request: piece by piece with an engine, otherwise whole.

    Arguments and errors are as in `continue_requests`.
    """
    if not runs_in_slots(own.model):
        ((completion,),) = continue_requests([request], own, engine, 1)
        yield completion.text
        return
    pieces = stream_request(engine(), request)
    with status("reading the text"):
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        if piece.text:
            yield piece.text


def _in_batches(
    requests: Sequence[Request], own: LoadedAdapter, sampling: Sampling, batch_size: int
) -> Iterator[Completion]:
    """Yields the completion of each request for the model's own adapter."""
    rows = []
    for request in requests:
        if request.adapter != own.key or request.ids is None or request.shares:
            raise InputError(
                "on a mesh and with streamed weights, rows are token ids for the model "
                "as it was trained: leave out adapters, embeddings and shared texts"
            )
        rows.append(request.ids)
    prompts = [x.prompt_id for x in requests if x.prompt_id is not None]
    new = continue_rows(
        own.model,
        own.parameters,
        rows,
        sampling,
        batch_size=batch_size,
        prompt_ids=prompts or None,
    )
    texts = decode_continuations(own.model, rows, new)
    for row, ids, text in zip(rows, new, texts, strict=True):
        ended = len(ids) < sampling.new_tokens
        yield Completion(
            text=text,
            ids=tuple(ids),
            reason="stop" if ended else "length",
            given_tokens=len(row),
        )


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
