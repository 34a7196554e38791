"""Runs fuzz cases in watched processes, and restarts those that hang or end."""

import collections
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.fuzz_kind import Kind, Outcome
from tests.fuzz.fuzz_worker import run_cases

CONTEXT = multiprocessing.get_context("spawn")
MAXIMUM_SECONDS = 20.0
START_SECONDS = 120.0
"""Time in which a worker has imported everything and begun its first case."""


def fuzz(
    kinds: Sequence[Kind],
    seed: int,
    cases: int,
    *,
    first: int = 0,
    seconds: float = float("inf"),
) -> Iterator[Outcome]:
    """Runs cases of several kinds in turn, and yields their outcomes.

    Args:
      kinds: kinds of input.
      seed: seed of the damage; the same seed and case always damage in the same way.
      cases: number of cases of each kind; case 0 is an undamaged input.
      first: number of the first case.
      seconds: time after which no case is begun.
    """
    pending = [
        (index, first + case) for case in range(cases) for index in range(len(kinds))
    ]
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        templates = Path(folder)
        # In another process, like the cases: type checks of this one would change the
        # defaults that gin records.
        writer = CONTEXT.Process(target=write_templates, args=(kinds, templates))
        writer.start()
        writer.join()
        assert writer.exitcode == 0, "a valid input could not be written"
        while pending:
            done = 0
            for outcome in _run_worker(kinds, templates, seed, pending, deadline):
                done += 1
                yield outcome
            pending = pending[done:]
            if time.monotonic() > deadline:
                return


def write_templates(kinds: Sequence[Kind], folder: Path) -> None:
    """Writes a valid input of each kind into a folder of its name."""
    for kind in kinds:
        (folder / kind.name).mkdir()
        kind.write(folder / kind.name)


def _run_worker(
    kinds: Sequence[Kind],
    templates: Path,
    seed: int,
    cases: Sequence[tuple[int, int]],
    deadline: float,
) -> Iterator[Outcome]:
    """Yields outcomes until the cases are done, or one of them hangs or crashes."""
    connection, theirs = CONTEXT.Pipe()
    worker = CONTEXT.Process(
        target=run_cases, args=(theirs, kinds, templates, seed, cases)
    )
    worker.start()
    theirs.close()
    current: tuple[int, int] | None = None
    try:
        while time.monotonic() < deadline or current is not None:
            limit = MAXIMUM_SECONDS if current else START_SECONDS
            if not _answers(connection, limit):
                assert current, "the worker did not start"
                yield _lost(kinds, current, f"no answer in {limit:g} seconds", limit)
                return
            try:
                message = connection.recv()
            except EOFError:
                worker.join()
                assert current, f"the worker ended with {worker.exitcode}"
                yield _lost(kinds, current, f"process ended: {worker.exitcode}", 0.0)
                return
            if message is None:
                return
            if isinstance(message, Outcome):
                current = None
                yield message
            else:
                current = message
    finally:
        worker.kill()
        worker.join()
        connection.close()


def _answers(connection: Connection, seconds: float) -> bool:
    """Waits for a message; a pause of the machine counts as one second at most."""
    last = time.monotonic()
    while seconds > 0:
        if connection.poll(0.5):
            return True
        now = time.monotonic()
        seconds -= min(now - last, 1.0)
        last = now
    return False


def _lost(
    kinds: Sequence[Kind], case: tuple[int, int], reason: str, seconds: float
) -> Outcome:
    return Outcome(kinds[case[0]].name, case[1], reason, "", seconds, 0.0)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns a table of the kinds: cases, outcomes, slowest case, greatest memory."""
    kinds = collections.defaultdict(list)
    for outcome in outcomes:
        kinds[outcome.kind].append(outcome)
    lines = [
        f"{'kind':<28} {'cases':>7} {'accepted':>8} {'refused':>8} {'failed':>7} "
        f"{'slowest':>9} {'memory':>9}"
    ]
    for name, members in (*kinds.items(), ("all", list(outcomes))):
        results = collections.Counter(
            "failed" if member.failed else member.result for member in members
        )
        lines.append(
            f"{name:<28} {len(members):>7,} {results['accepted']:>8,} "
            f"{results['refused']:>8,} {results['failed']:>7,} "
            f"{max((m.seconds for m in members), default=0):>7.1f} s "
            f"{max((m.megabytes for m in members), default=0):>5.0f} MiB"
        )
    return "\n".join(lines)


def describe(outcome: Outcome, seed: int) -> str:
    """Returns the failure of a case, and the command that repeats it."""
    return (
        f"{outcome.kind}, case {outcome.case}: {outcome.result}\n{outcome.details}\n"
        f"repeat it with: scripts/fuzz.py --seed {seed} --kind {outcome.kind} "
        f"--case {outcome.case}"
    )


@contextlib.contextmanager
def damaged_copy(kind: Kind, seed: int, case: int) -> Iterator[Path]:
    """Writes the damaged input of one case, for a look at it."""
    with tempfile.TemporaryDirectory() as folder:
        kind.write(Path(folder))
        kind.damage(seed, case, Path(folder))
        yield Path(folder)
