"""Commands in forked processes, and the files that they leave."""

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TIMES = ("tokens_per_second", "data_wait_share", "sampled_per_second")
"""Logged values that depend on the clock."""

IGNORED = ("tensorboard", "curves.png", "run.json", "jax")
"""Names of files that are not compared: they contain times or compiler flags."""

LONGEST = 600.0
"""Timeout of a command in seconds."""

PHASES = {
    "sampling": "training.rollouts.answer_sampler:AnswerSampler.__call__",
    "rewards": "training.rollouts.reward_calls:RewardCalls.__call__",
    "recording": "training.rollouts.rollout_log:RolloutLog.write",
    "update": "training.step:CompiledStep.__call__",
    "saving": "checkpoints.run_store.checkpoint_store:CheckpointStore.save",
}
"""Methods that mark the phase of a run, which is reported where it is killed."""
BETWEEN = "between"


Contents = dict[str, bytes | None]
"""Compared content by relative path; None for folders."""


def run_forked(function: Callable[[], object]) -> int:
    """Calls a function in a process that ends with it; returns its exit status."""
    child = os.fork()
    if not child:
        with _leaving():
            function()
    return os.waitpid(child, 0)[1]


def start(target: Path, commands: Sequence[Sequence[str]]) -> list[int]:
    """Forks a process for each command; returns their numbers."""
    processes = []
    for number, command in enumerate(commands):
        process = os.fork()
        if not process:
            with _leaving():
                printed = os.open(
                    output(target, number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                )
                for stream in (1, 2):
                    os.dup2(printed, stream)
                mark_phases(target)
                from prompt_tuning.cli.main import main as run

                code = run(list(command))
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return processes


def output(target: Path, number: int) -> Path:
    """Returns the file of what a process prints, next to its folder."""
    return target.with_name(f"{target.name}.{number}.out")


def mark_phases(target: Path) -> None:
    """Lets this process write the phase that its run is in to a file."""
    file = os.open(_phase_file(target), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def marking(phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **keywords):
            os.pwrite(file, phase.ljust(20).encode(), 0)
            try:
                return function(*arguments, **keywords)
            finally:
                os.pwrite(file, BETWEEN.ljust(20).encode(), 0)

        return call

    for phase, name in PHASES.items():
        module, _, method = f"prompt_tuning.{name}".partition(":")
        owner = getattr(importlib.import_module(module), method.partition(".")[0])
        method = method.partition(".")[2]
        setattr(owner, method, marking(phase, getattr(owner, method)))


def phase_of(target: Path) -> str:
    """Returns the phase that a killed run was in."""
    file = _phase_file(target)
    text = file.read_text().strip() if file.exists() else ""
    return text or "starting"


def _phase_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.phase")


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Ends a forked process with the block, whatever happens in it."""
    try:
        yield
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


class RunningClock:
    """Seconds for which this process has run; pauses of the machine do not count."""

    def __init__(self):
        self.seconds, self._last = 0.0, time.monotonic()

    def sleep(self) -> None:
        """Waits for a moment."""
        time.sleep(0.02)
        now = time.monotonic()
        self.seconds += min(now - self._last, 1.0)
        self._last = now


def wait(process: int, clock: RunningClock) -> int:
    """Waits for a process; returns its exit code, negative for a signal.

    Raises:
      RuntimeError: if it does not end in time.
    """
    while clock.seconds < LONGEST:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        clock.sleep()
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise RuntimeError(f"a process did not end within {LONGEST:.0f} seconds")


def contents(target: Path) -> Contents:
    """Returns the compared content of each name in a folder."""
    by_name: Contents = {}
    for path in sorted(target.rglob("*")):
        name = path.relative_to(target)
        if not any(part in IGNORED for part in name.parts):
            by_name[name.as_posix()] = _compared(path, target)
    return by_name


def _compared(path: Path, target: Path) -> bytes | None:
    if path.is_dir():
        return None
    content = path.read_bytes().replace(str(target).encode(), b"TARGET")
    if path.name == "provenance.json":
        # The config, which is compared itself, contains the path of the target.
        record = json.loads(content)
        record.pop("config", None)
        return json.dumps(record).encode()
    if path.name != "metrics.jsonl":
        return content
    lines = [json.loads(line) for line in content.splitlines()]
    timeless = [{k: x for k, x in line.items() if k not in TIMES} for line in lines]
    return json.dumps(timeless).encode()


def differences(expected: Contents, actual: Contents) -> list[str]:
    """Returns the names that are missing, unexpected, or have another content."""
    names = expected.keys() | actual.keys()
    missing = object()
    return sorted(
        name
        for name in names
        if expected.get(name, missing) != actual.get(name, missing)  # type: ignore
    )
