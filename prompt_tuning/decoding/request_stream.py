"""The pieces of one request, as its caller shows them while they are generated."""

from collections.abc import Iterator

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Piece, Request


def stream_request(engine: DecodingEngine, request: Request) -> Iterator[Piece]:
    """Submits a request, steps, and yields its pieces until it has ended.

    A request whose caller stops reading is cancelled. Pieces of other requests are
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
