"""Runs the tasks of a preparation in worker processes; results come in order."""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.encoding_worker import (
    EncodedRecords,
    EncodingTask,
    EncodingWorker,
)
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_index import RecordIndex
from prompt_tuning.data.preparation.record_order import SPLIT_NAMES, RecordOrder

TASK_BYTES = 1 << 20
TASK_RECORDS = 1 << 12
TASKS_PER_WORKER = 2
"""Submitted tasks per process: one that is running, and one that waits."""

_worker: EncodingWorker | None = None


def available_cores() -> int:
    """Returns the number of cores that this process may use, or else of all cores."""
    if sys.version_info >= (3, 13):
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerLostError(RuntimeError):
    """A worker process was killed; its finished work is kept."""


def split_tasks(order: RecordOrder, index: RecordIndex) -> Iterator[EncodingTask]:
    """Yields the tasks of all splits.

    The division of the records into tasks does not affect the output.
    """
    for split in range(len(SPLIT_NAMES)):
        first = 0
        while first < order.positions(split):
            records, first = order.block(split, first)
            entries = index.read(records)
            for start, stop in _task_bounds(entries[:, 2]):
                yield EncodingTask(split, entries[start:stop])


def _task_bounds(sizes: Int64[np.ndarray, "n"]) -> Iterator[tuple[int, int]]:
    """Yields the first record of every task and the one after its last."""
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + TASK_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + TASK_RECORDS)
        yield start, stop
        start = stop


def run_tasks(
    tasks: Iterable[EncodingTask],
    worker: EncodingWorker,
    preparation: Preparation,
    files: Sequence[InputFile],
    workers: int,
    shards: Path,
) -> Iterator[tuple[EncodingTask, EncodedRecords]]:
    """Runs tasks in this process for one worker, else in other processes.

    Yields the tasks with their results in order. The results are kept in `shards`, and
    results from an earlier process are used. WorkerLostError if a process was killed,
    for example for lack of memory.
    """
    named = ((task, shards / f"{number}.npz") for number, task in enumerate(tasks))
    if workers == 1:
        for task, shard in named:
            yield task, _load_or_encode(task, shard, worker)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(preparation, tuple(files)),
    )
    try:
        for task, shard in _run_in_order(pool, named, TASKS_PER_WORKER * workers):
            yield task, _load_or_encode(task, shard, worker)
    except BrokenProcessPool as error:
        raise WorkerLostError(
            "a worker process was killed, perhaps for lack of memory: reduce "
            "--workers; the same command resumes where this one stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _run_in_order(
    pool: concurrent.futures.Executor,
    tasks: Iterable[tuple[EncodingTask, Path]],
    ahead: int,
) -> Iterator[tuple[EncodingTask, Path]]:
    pending: collections.deque = collections.deque()
    for task, shard in tasks:
        pending.append((task, shard, pool.submit(_run_task, task, shard)))
        if len(pending) > ahead:
            first, file, future = pending.popleft()
            future.result()
            yield first, file
    for first, file, future in pending:
        future.result()
        yield first, file


def _load_or_encode(
    task: EncodingTask, shard: Path, worker: EncodingWorker
) -> EncodedRecords:
    if shard.exists():
        with contextlib.suppress(InputError):  # damaged by a power cut
            return EncodedRecords.load(shard)
    encoded = worker(task)
    encoded.save(shard)
    return encoded


def _start_worker(preparation: Preparation, files: Sequence[InputFile]) -> None:
    global _worker
    # Ctrl-C reaches all processes; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes already use all cores; threads inside them would compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = EncodingWorker(preparation, files)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_task(task: EncodingTask, shard: Path) -> None:
    assert _worker is not None
    if not shard.exists():
        _worker(task).save(shard)
