"""The thread that runs the decoding engine, and streams of its pieces."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.engine_metrics import EngineMetrics
from prompt_tuning.decoding.request import Piece, Request, RequestHandle
from prompt_tuning.decoding.token_masks import RowMask
from prompt_tuning.server.server_limits import BusyError, RequestError

STOPPED = "the engine has stopped"
STOPPING = "the server is stopping"
PATIENCE = 1.0
"""Seconds to wait for the thread to end; it may be compiling for longer."""


class EngineThread:
    """Runs an engine in a thread, for coroutines of one event loop.

    Only this thread uses the engine from now on; `on_failure` is called in the event
    loop if the engine fails.
    """

    def __init__(
        self,
        engine: DecodingEngine,
        queue_length: int,
        on_failure: Callable[[], Any] = lambda: None,
    ):
        self.engine, self.queue_length = engine, queue_length
        self._on_failure = on_failure
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[int, Generation] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._ended = self.failed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # In the event loop

    async def call(self, function: Callable[[DecodingEngine], Any]) -> Any:
        """Calls a function with the engine between two steps, and returns its result.

        Raises:
          RequestError: if the engine has stopped.
        """
        if self._ended:
            raise RequestError(STOPPED, 503, "server_error")
        future = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

        def answer(result: Any, problem: Exception | None) -> None:
            if future.done():  # the client has gone away
                return
            if problem is None:
                future.set_result(result)
            else:
                future.set_exception(problem)

        def run() -> None:
            result, problem = None, None
            try:
                result = function(self.engine)
            except (ValueError, RequestError) as error:
                problem = error
            self._post(answer, result, problem)

        self._calls.put(run)
        return await asyncio.shield(future)

    async def metrics(self) -> EngineMetrics:
        """Returns a snapshot of the engine."""
        return await self.call(lambda engine: engine.metrics())

    async def generate(
        self, requests: Sequence[Request], masks: Sequence[RowMask | None]
    ) -> "Generation":
        """Submits requests as one stream of pieces.

        Raises:
          InputError: if one cannot be served; then none is submitted.
          BusyError: if the queue is full.
        """
        generation = Generation(self)

        def submit(engine: DecodingEngine) -> None:
            if generation.closed:
                return
            self._check_queue(engine, requests)
            try:
                for request, mask in zip(requests, masks, strict=True):
                    handle = engine.submit(request, mask)
                    generation.numbers[handle.number] = len(generation.handles)
                    generation.handles.append(handle)
                    self._streams[handle.number] = generation
            except ValueError:
                self.cancel(generation)
                raise

        try:
            await self.call(submit)
        except BaseException:
            generation.close()
            raise
        return generation

    def end(self) -> None:
        """Ends all streams and calls, and refuses new ones."""
        self._end_all(RequestError(STOPPING, 503, "server_error"))

    async def stop(self) -> None:
        """Ends the thread after the remaining rows; waits only briefly."""
        self._calls.put(None)
        await asyncio.wait([self._done], timeout=PATIENCE)

    @property
    def busy(self) -> bool:
        """Whether the thread is still alive."""
        return self._thread.is_alive()

    def put_cancel(self, generation: "Generation") -> None:
        """Frees the slots of a generation before the next step."""
        self._calls.put(lambda: self.cancel(generation))

    def _dispatch(self, pieces: Sequence[tuple["Generation", Piece]]) -> None:
        for generation, piece in pieces:
            generation.pieces.put_nowait(piece)

    def _fail(self) -> None:
        """Ends all streams after the engine failed."""
        self.failed = True
        self._end_all(RequestError(STOPPED, 500, "server_error"))
        self._on_failure()

    def _end_all(self, problem: RequestError) -> None:
        self._ended = True
        # The engine's thread may change the original meanwhile.
        for generation in {id(x): x for x in self._streams.copy().values()}.values():
            generation.pieces.put_nowait(problem)
        for future in [each for each in self._pending if not each.done()]:
            future.set_exception(problem)

    # In the thread

    def _check_queue(self, engine: DecodingEngine, requests: Sequence[Request]) -> None:
        rows = sum(request.sampling.n for request in requests)
        client = requests[0].client if requests else None
        if not engine.has_room(client, rows, self.queue_length):
            metrics = engine.metrics()
            raise BusyError(
                f"{metrics.queued} rows wait for {metrics.slots} slots, and "
                f"{self.queue_length} may: try again later"
            )

    def cancel(self, generation: "Generation") -> None:
        """Frees the slots of a generation; call it in the thread."""
        for handle in generation.handles:
            self._streams.pop(handle.number, None)
            if not handle.finished:
                self.engine.cancel(handle)

    def _run(self) -> None:
        complete = False
        try:
            self._serve()
            complete = True
        finally:
            if complete:
                self._ended = True
            else:
                self._post(self._fail)
            self._post(self._done.set_result, None)

    def _post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function in the event loop, if that is still running."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _serve(self) -> None:
        """Runs calls and steps until stopped and no row is left."""
        stopping = False
        while not (stopping and self.engine.idle):
            # An idle engine sleeps until the next call.
            while self.engine.idle or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    stopping = True
                    break
                call()
            if self.engine.idle:
                continue
            stepped = self.engine.step()
            pieces = [
                (self._streams[piece.handle.number], piece)
                for piece in stepped
                if piece.handle.number in self._streams
            ]
            # Samples of a request may all end in one step.
            for piece in stepped:
                if piece.handle.finished:
                    self._streams.pop(piece.handle.number, None)
            if pieces:
                self._post(self._dispatch, pieces)


class Generation:
    """The rows of one HTTP request.

    Attributes:
      handles: its requests, in order.
      numbers: index of each request among them, by the engine's number.
      pieces: unread pieces; an error ends them.
    """

    def __init__(self, thread: EngineThread):
        self._thread = thread
        self.handles: list[RequestHandle] = []
        self.numbers: dict[int, int] = {}
        self.pieces: asyncio.Queue[Piece | RequestError] = asyncio.Queue()
        self.closed = False

    def row(self, piece: Piece) -> int:
        """Returns the index of a piece's row among all samples of all requests."""
        samples = piece.handle.request.sampling.n
        return self.numbers[piece.handle.number] * samples + piece.sample

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yields the pieces of all rows until they have ended.

        Raises:
          RequestError: if the engine fails or ends.
        """
        left = sum(handle.request.sampling.n for handle in self.handles)
        while left:
            piece = await self.pieces.get()
            if isinstance(piece, RequestError):
                raise piece
            left -= piece.completion is not None
            yield piece

    def close(self) -> None:
        """Frees the slots of unfinished rows."""
        if not self.closed:
            self.closed = True
            self._thread.put_cancel(self)
