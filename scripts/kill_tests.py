"""Kills commands at random times, repeats them, and compares the bits at the end.

    python -m scripts.kill_tests --kills 1000 --seed 1 --pairs 20

Each trial starts a command in a new folder, kills it with SIGKILL at random times (one
to five times), starts it again, and lets the last start finish. The folder must then be
bitwise equal to that of an undisturbed command: checkpoints, logs without times,
sampled answers, prepared files, and no other names. Pairs of commands that write one
run directory are started within a second: exactly one of the two may continue.

Commands run in processes forked from one that has imported the package, so a start
takes a fraction of the usual time.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TIMES = ("tokens_per_second", "data_wait_share", "sampled_per_second")
"""Logged values that depend on the clock."""

IGNORED = ("tensorboard", "curves.png", "run.json", "jax")
"""Names of files that are not compared: they contain times or compiler flags."""

LONGEST = 600.0
"""Timeout of a command in seconds."""

MOST_KILLS = 5
"""Maximum number of kills in one trial."""

PHASES = {
    "sampling": "rollouts.answer_sampler:AnswerSampler.__call__",
    "rewards": "rollouts.reward_calls:RewardCalls.__call__",
    "recording": "rollouts.rollout_log:RolloutLog.write",
    "update": "training.step:CompiledStep.__call__",
    "saving": "checkpoints.run_store.checkpoint_store:CheckpointStore.save",
}
"""Methods that mark the phase of a run, which is reported where it is killed."""
BETWEEN = "between"


Contents = dict[str, bytes | None]
"""Compared content by relative path; None for folders."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A command that is killed.

    Attributes:
      name: name in the table.
      commands: returns the arguments of each process, given the folder to write to.
      refuses_again: whether the command fails if it was completed before.
    """

    name: str
    commands: Callable[[Path], list[list[str]]]
    refuses_again: bool = False


@dataclasses.dataclass
class Row:
    """Results of one scenario."""

    trials: int = 0
    kills: int = 0
    differing: int = 0
    phases: Counter[str] = dataclasses.field(default_factory=Counter)


def main() -> int:
    """Runs the tests; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--pairs", type=int, default=0, metavar="N")
    parser.add_argument(
        "--disk_sizes", type=int, default=0, metavar="N", help="needs root, for mount"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only these scenarios"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill_tests-"))
    try:
        _import_package(folder)
        fork_writing_inputs(folder)
        scenarios = [
            scenario
            for scenario in make_scenarios(folder)
            if options.only is None or scenario.name in options.only
        ]
        randomness = random.Random(options.seed)
        failed = False
        if options.kills:
            failed |= run_kills(folder, scenarios, options.kills, randomness)
        if options.pairs:
            from scripts.pair_tests import run_pairs  # imports this module

            failed |= run_pairs(folder, options.pairs, randomness)
        if options.disk_sizes:
            from scripts.full_disk_tests import run_full_disks  # imports this module

            sizes = options.disk_sizes
            failed |= run_full_disks(folder, scenarios, sizes, randomness)
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


def _import_package(folder: Path) -> None:
    """Imports what commands import; no thread and no device is started."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    warnings.filterwarnings("ignore", message=".*os.fork.*")
    import prompt_tuning.api.tune
    import prompt_tuning.cli.main
    import prompt_tuning.config.gin_files
    import prompt_tuning.rollouts.rollout_stream
    import prompt_tuning.sweep.sweep_plot
    import prompt_tuning.sweep.sweep_run
    import prompt_tuning.tuned.adapter_conversion  # noqa: F401
    from prompt_tuning.data.preparation import worker_pool

    worker_pool.TASK_RECORDS = 200  # many shards of small inputs


def fork_writing_inputs(folder: Path) -> None:
    """Writes model and data in a process that ends, as it starts JAX's threads."""
    child = os.fork()
    if not child:
        with _leaving():
            write_inputs(folder)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the inputs could not be written")


def write_inputs(folder: Path) -> None:
    """Writes a random model of one layer, and pairs of one skill."""
    from scripts import recall
    from tests.support import small_runs
    from tests.support.small_tokenizer import write_tokenizer

    small_runs.write_model(folder / "model", small_runs.DECODER)
    small_runs.write_pairs(folder / "train.jsonl", small_runs.UPPER[:32])
    small_runs.write_pairs(folder / "held_out.jsonl", small_runs.UPPER[32:])
    small_runs.write_pairs(folder / "long.jsonl", small_runs.UPPER * 200)
    write_tokenizer(folder / "tokenizer")
    facts, _ = recall.document(0, 36)
    (folder / "facts.txt").write_text(facts)
    first = facts.splitlines()[0]
    (folder / "changed.txt").write_text(facts.replace(first, f"{first[:5]}nana"))
    from prompt_tuning.cli.main import main as run

    run(remembering(folder, "facts.txt", folder / "old", "--slots", "12"))


def remembering(folder: Path, name: str, output: Path, *more: str) -> list[str]:
    """Returns a command that remembers a document."""
    options = ["--model", "bundled:recall", "--out", str(output)]
    options += ["--rows", "64", "--held_out", "16", "--steps", "40"]
    return ["remember", str(folder / name), *options, *more]


def make_scenarios(folder: Path) -> list[Scenario]:
    """Returns all scenarios."""

    def train(target: Path) -> list[list[str]]:
        return [["train", *run_options(folder, target / "run")]]

    def sweep(target: Path) -> list[list[str]]:
        vary = ["--vary", "Run.seed=0,1,2"]
        return [["sweep", *run_options(folder, target / "run"), *vary]]

    def prepare(target: Path) -> list[list[str]]:
        options = ["--output", str(target / "out"), "--length", "32", "--workers", "1"]
        options += ["--tokenizer", str(folder / "tokenizer"), "--dev", "0.1"]
        return [["prepare", *options, str(folder / "long.jsonl")]]

    def study(target: Path) -> list[list[str]]:
        options = ["--model", "bundled:recall", "--out", str(target / "study")]
        sizes = ["--rows", "240", "--held_out", "16", "--chunk", "72"]
        return [["study", str(folder / "facts.txt"), *options, *sizes]]

    def remember(target: Path) -> list[list[str]]:
        return [remembering(folder, "facts.txt", target / "memory", "--slots", "12")]

    def update(target: Path) -> list[list[str]]:
        old = "--from", str(folder / "old")
        return [remembering(folder, "changed.txt", target / "memory", *old)]

    def rewards(target: Path) -> list[list[str]]:
        options = ["--model", str(folder / "model"), "--out", str(target / "run")]
        options += ["--train", str(folder / "train.jsonl"), "--no_report"]
        options += ["--loss", "grpo", "--reward", "scripts.kill_tests:slow_reward"]
        options += ["--group", "4", "--new_tokens", "8", "--updates", "2"]
        options += ["--resample", "2", "--replay", "--prompt_length", "4"]
        options += ["--steps", "24", "--batch_size", "4", "--gin.Run.save_every=4"]
        return [["train", *options, "--gin.Run.log_every=1", "--gin.Run.keep_last=2"]]

    def two(target: Path) -> list[list[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joined = [f"--coordinator=127.0.0.1:{port}", "--processes=2", "--silence=20"]
        (command,) = train(target)
        command = [*command, "--gin.Run.mesh=@MeshShape()", *joined]
        return [[*command, f"--process={number}"] for number in range(2)]

    return [
        Scenario("train", train),
        Scenario("sweep", sweep),
        Scenario("rewards", rewards),
        Scenario("prepare", prepare, refuses_again=True),
        Scenario("study", study),
        Scenario("remember", remember),
        Scenario("update", update),
        Scenario("two processes", two),
    ]


def slow_reward(prompt: str, completion: str, row: dict) -> float:
    """A reward that answers to every other prompt do not differ in."""
    del row
    time.sleep(0.002)
    return float(sum(map(ord, completion)) % 2) if len(prompt) % 2 else 0.5


def run_options(folder: Path, run: Path, steps: int = 24) -> list[str]:
    """Returns the options of a run that saves eight checkpoints."""
    values = {
        "MODEL": str(folder / "model"),
        "TRAIN_FILES": str(folder / "train.jsonl"),
        "EVALUATION_FILES": str(folder / "held_out.jsonl"),
        "RUN_DIRECTORY": str(run),
        "PROMPT_LENGTH": 4,
        "BATCH_SIZE": 8,
        "Run.steps": steps,
        "Run.save_every": 3,
        "Run.evaluate_every": 9,
        "Run.log_every": 1,
        "Run.keep_last": 2,
        "DataSource.buckets": 1,
    }
    bindings = [f"--gin.{name}={value!r}" for name, value in values.items()]
    return ["--gin_file=runs/first_prompt.gin", *bindings]


def run_kills(
    folder: Path, scenarios: Sequence[Scenario], kills: int, randomness: random.Random
) -> bool:
    """Kills commands until the number is reached; returns whether anything differs."""
    expected = {x.name: run_undisturbed(folder, x) for x in scenarios}
    rows = {scenario.name: Row() for scenario in scenarios}
    began = time.monotonic()
    # The same time for each, so that faster commands are killed more often.
    weights = [1 / expected[scenario.name][1] for scenario in scenarios]
    for trial in itertools.count(1):
        (scenario,) = randomness.choices(scenarios, weights)
        row, target = rows[scenario.name], folder / padded(f"trial_{trial}")
        contents_expected, seconds = expected[scenario.name]
        target.mkdir()
        row.trials += 1
        problems = []
        for _ in range(randomness.randint(1, MOST_KILLS)):
            delay = randomness.uniform(0.05, 1.05) * seconds
            killed = kill(target, scenario, delay, randomness)
            row.kills += killed
            if not killed:
                break  # it ended before the kill
            row.phases[phase_of(target)] += 1
        else:
            problems = finish(target, scenario)
        problems += differences(contents_expected, contents(target))
        if scenario.refuses_again and "already; --force" in "".join(problems[:1]):
            problems = problems[1:]  # killed after everything was done
        if problems:
            row.differing += 1
            print(f"DIFFERS {scenario.name} {target}: {problems}", flush=True)
        else:
            shutil.rmtree(target)
        done = sum(row.kills for row in rows.values())
        if trial % 10 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{done} kills in {minutes:.1f} min", flush=True)
        if done >= kills:
            break
    print("\n| scenario | trials | kills | trials with differing bits |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row.trials} | {row.kills} | {row.differing} |")
    for name, row in rows.items():
        counts = ", ".join(f"{n} in {phase}" for phase, n in row.phases.most_common())
        print(f"{name} was killed: {counts}")
    return any(row.differing for row in rows.values())


def padded(name: str) -> str:
    """Returns a name of a constant length: gin breaks lines by the length of paths."""
    return name.ljust(30, "_")


def run_undisturbed(folder: Path, scenario: Scenario) -> tuple[Contents, float]:
    """Returns a command's output files and its seconds."""
    target = folder / padded(f"undisturbed_{scenario.name.replace(' ', '_')}")
    seconds = float("inf")
    for _ in range(2):  # the second start reads the compilation cache
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        started = time.monotonic()
        if problems := finish(target, scenario):
            raise RuntimeError(f"{scenario.name} fails: {problems}")
        seconds = min(seconds, time.monotonic() - started)
    print(f"{scenario.name}: {seconds:.1f} s", flush=True)
    return contents(target), seconds


def kill(
    target: Path, scenario: Scenario, delay: float, randomness: random.Random
) -> int:
    """Starts a command and kills its processes; returns how many had not ended."""
    processes = start(target, scenario.commands(target))
    time.sleep(delay)
    order = randomness.sample(processes, len(processes))
    killed = 0
    for number, process in enumerate(order):
        if number:
            time.sleep(randomness.choice((0.0, randomness.uniform(0.0, 0.3))))
        os.kill(process, signal.SIGKILL)
    for process in order:
        _, status = os.waitpid(process, 0)
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return killed


def finish(target: Path, scenario: Scenario) -> list[str]:
    """Runs a command to its end; returns what it printed if it failed."""
    processes = start(target, scenario.commands(target))
    clock = RunningClock()
    codes = [wait(process, clock) for process in processes]
    return [
        f"exit code {code}: {output(target, number).read_text()}"
        for number, code in enumerate(codes)
        if code
    ]


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


if __name__ == "__main__":
    sys.exit(main())
