"""Commands that are killed, and the inputs that they read."""

import dataclasses
import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from scripts.crashes.processes import run_forked


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


def import_package(folder: Path) -> None:
    """Imports what commands import; no thread and no device is started."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
    warnings.filterwarnings("ignore", message=".*os.fork.*")
    import prompt_tuning.api.tune
    import prompt_tuning.cli.main
    import prompt_tuning.config.gin_files
    import prompt_tuning.training.rollouts.rollout_stream
    import prompt_tuning.training.sweep.sweep_plot
    import prompt_tuning.training.sweep.sweep_run
    import prompt_tuning.tuned.adapter_conversion  # noqa: F401
    from prompt_tuning.data.preparation import worker_pool

    worker_pool.TASK_RECORDS = 200  # many shards of small inputs


def fork_writing_inputs(folder: Path) -> None:
    """Writes model and data in a process that ends, as it starts JAX's threads."""
    if run_forked(lambda: write_inputs(folder)):
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
        options += [
            "--loss",
            "grpo",
            "--reward",
            "scripts.crashes.scenarios:slow_reward",
        ]
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
