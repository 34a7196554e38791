"""Measures a newcomer's first run: its own data, a tiny model and an empty cache.

    python -m scripts.bench.first_run --model DIR --questions train_5500.label

Trains `runs/first_prompt` for 60 steps on 400 of TREC's questions, in a process with a
terminal of its own. Prints the seconds until the end, the processor seconds, and the
longest time for which the terminal did not change. `--warm` runs it again with the
cache of the first run; `--python` calls `prompt_tuning.tune` instead of the command.
"""

import argparse
import os
import pty
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from scripts.bench.trec import read_questions, write_pairs
from scripts.bench.workers import ROOT

TRAINING, HELD_OUT, STEPS = 400, 100, 60
TUNE = """
import sys
import prompt_tuning as pt
model, train, held_out, directory = sys.argv[1:]
pt.tune(
    model,
    pt.SoftPrompt(length=20),
    data=[train],
    evaluation=[held_out],
    steps={steps},
    batch_size=32,
    directory=directory,
)
"""


class Cost(NamedTuple):
    """What a run took.

    Attributes:
      seconds: seconds until the end.
      processor: processor seconds of the process, in user mode and in the system.
      silence: longest time in seconds without output.
      before: what the terminal showed before that time, without its control codes.
    """

    seconds: float
    processor: float
    silence: float
    before: str


def main() -> None:
    """Writes the data, trains in a new folder and prints what it took."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--questions", required=True, help="TREC's train_5500.label")
    parser.add_argument("--warm", action="store_true", help="run a second time, too")
    parser.add_argument("--python", action="store_true", help="call prompt_tuning.tune")
    parser.add_argument("--show", action="store_true", help="show the run's terminal")
    parser.add_argument("options", nargs="*", help="further options of `train`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = read_questions(Path(arguments.questions))
        write_pairs(folder / "train.jsonl", pairs[:TRAINING])
        write_pairs(folder / "held_out.jsonl", pairs[-HELD_OUT:])
        for kind in ("cold", "warm")[: 1 + arguments.warm]:
            command = build_command(arguments, folder, folder / kind)
            cost = run_in_terminal(command, folder, show=arguments.show)
            print(
                f"{kind}: {cost.seconds:.1f} s, {cost.processor:.1f} s of processors, "
                f"at most {cost.silence:.1f} s without output, after {cost.before!r}"
            )


def build_command(
    arguments: argparse.Namespace, folder: Path, directory: Path
) -> list[str]:
    """Returns the command that trains in a directory."""
    model = str(Path(arguments.model).resolve())
    train, held_out = str(folder / "train.jsonl"), str(folder / "held_out.jsonl")
    if arguments.python:
        code = TUNE.format(steps=STEPS)
        return [sys.executable, "-c", code, model, train, held_out, str(directory)]
    values = {
        "MODEL": model,
        "TRAIN_FILES": train,
        "EVALUATION_FILES": held_out,
        "RUN_DIRECTORY": str(directory),
        "STEPS": STEPS,
    }
    command = [sys.executable, "-m", "prompt_tuning", "train"]
    command += ["--gin_file", "runs/first_prompt.gin"]
    bindings = [f"--gin.{name}={value!r}" for name, value in values.items()]
    return [*command, *bindings, *arguments.options]


def run_in_terminal(command: list[str], folder: Path, *, show: bool) -> Cost:
    """Runs a command in a terminal of its own, with its cache in the folder.

    Raises:
      SystemExit: if the command fails, with what it printed.
    """
    started = last = time.monotonic()
    process, terminal = pty.fork()
    if not process:
        os.chdir(ROOT)
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        os.execvpe(command[0], command, os.environ | cache)
    silence, before, output = 0.0, "", b""
    while new := read_some(terminal):
        now = time.monotonic()
        if now - last > silence:
            silence, before = now - last, last_line(output)
        last, output = now, output + new
        if show:
            sys.stdout.buffer.write(new)
            sys.stdout.flush()
    _, status, usage = os.wait4(process, 0)
    seconds = time.monotonic() - started
    if status:
        raise SystemExit(output.decode(errors="replace"))
    return Cost(seconds, usage.ru_utime + usage.ru_stime, silence, before)


def read_some(terminal: int) -> bytes:
    """Reads what the process wrote; empty at its end."""
    try:
        return os.read(terminal, 2**16)
    # Linux reports the end of a terminal's process as an error of its input.
    except OSError:
        return b""


def last_line(output: bytes) -> str:
    """Returns the last line that a terminal shows, without colors."""
    from rich.text import Text

    lines = output.decode(errors="replace").replace("\r", "\n").splitlines()
    shown = [Text.from_ansi(line).plain.strip() for line in lines[-20:]]
    return next((line for line in reversed(shown) if line), "")[:70]


if __name__ == "__main__":
    main()
