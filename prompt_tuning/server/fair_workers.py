"""Worker threads for an event loop, shared fairly among clients."""

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from prompt_tuning.core.fair_queue import FairQueue
from prompt_tuning.server.server_limits import BusyError

Result = TypeVar("Result")


class FairWorkers:
    """Runs functions in a few threads; clients take turns.

    If the caller is cancelled, a waiting job never starts; a running one goes on and
    occupies its thread until it ends. At most `waiting` jobs wait; see
    `FairQueue.has_room`.
    """

    def __init__(self, name: str, workers: int, waiting: int):
        self._name, self._limit = name, waiting
        self._workers = self._free = workers
        self._turns: FairQueue[asyncio.Future[None]] = FairQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._free < self._workers

    async def run(self, client: Hashable, function: Callable[[], Result]) -> Result:
        """Returns the result of a function that runs in a thread.

        Raises:
          BusyError: if too many jobs wait.
        """
        await self._wait(client)
        loop = asyncio.get_running_loop()
        job = self._threads.submit(function)

        def ended(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    async def _wait(self, client: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        if not self._turns.has_room(client, 1, self._limit):
            raise BusyError(
                f"{len(self._turns)} requests wait for {self._name}: try again later"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.put(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._turns.remove(turn)
            else:
                self._release()
            raise

    def _release(self) -> None:
        while self._turns:
            turn = self._turns.pop()
            if not turn.done():  # its caller is cancelled
                turn.set_result(None)
                return
        self._free += 1
