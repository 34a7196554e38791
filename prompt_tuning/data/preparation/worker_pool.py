"""Tasks in their order, done by several processes, their answers in the same order."""

import collections
import concurrent.futures
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

import numpy as np
from jaxtyping import Int64

from prompt_tuning.data.preparation.encoding_worker import Done, Task, TaskWorker
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_index import RecordIndex
from prompt_tuning.data.preparation.record_order import SPLIT_NAMES, RecordOrder

TASK_BYTES = 1 << 20
TASK_RECORDS = 1 << 12
AHEAD = 2
"""Tasks in the air for each process: one that is done, and one to wait for."""

_worker: TaskWorker | None = None


def available_cores() -> int:
    """How many cores this process may use, or has where the system does not say."""
    if sys.version_info >= (3, 13):
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerLostError(RuntimeError):
    """A process ended in the middle of its work; what was done before is kept."""


def tasks(
    order: RecordOrder, index: RecordIndex, split: int, position: int
) -> Iterator[Task]:
    """The tasks of all splits, from a position of one of them on.

    How the records are cut into tasks changes nothing in the output.
    """
    for number in range(split, len(SPLIT_NAMES)):
        first = position if number == split else 0
        while first < order.positions(number):
            records, positions, first = order.block(number, first)
            places = index.read(records)
            for start, stop in _cuts(places[:, 2]):
                after = int(positions[stop - 1]) + 1
                yield Task(number, places[start:stop], after)


def _cuts(sizes: Int64[np.ndarray, "n"]) -> Iterator[tuple[int, int]]:
    """From where to where records go into one task."""
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + TASK_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + TASK_RECORDS)
        yield start, stop
        start = stop


def do_tasks(
    work: Iterable[Task],
    worker: TaskWorker,
    preparation: Preparation,
    files: Sequence[InputFile],
    workers: int,
) -> Iterator[tuple[Task, Done]]:
    """Does tasks; with one worker in this process, else in as many of their own.

    Args:
      work: the tasks.
      worker: this process's own.
      preparation: what the others make theirs of.
      files: the same.
      workers: how many processes.

    Raises:
      WorkerLostError: if a process was killed, as for want of memory.
    """
    if workers == 1:
        for task in work:
            yield task, worker(task)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(preparation, tuple(files)),
    )
    try:
        yield from _in_order(pool, work, AHEAD * workers)
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process was killed, perhaps for want of memory: ask for fewer "
            "--workers; the same command goes on where this one stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: concurrent.futures.Executor, work: Iterable[Task], ahead: int
) -> Iterator[tuple[Task, Done]]:
    flying: collections.deque[tuple[Task, concurrent.futures.Future[Done]]]
    flying = collections.deque()
    for task in work:
        flying.append((task, pool.submit(_do, task)))
        if len(flying) > ahead:
            first, future = flying.popleft()
            yield first, future.result()
    for first, future in flying:
        yield first, future.result()


def _begin(preparation: Preparation, files: Sequence[InputFile]) -> None:
    global _worker
    # An interruption is the parent's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; threads of each would only stand in their way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = TaskWorker(preparation, files)


def _end_with_parent() -> None:
    """A parent that is killed leaves no process behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(task: Task) -> Done:
    assert _worker is not None
    return _worker(task)
