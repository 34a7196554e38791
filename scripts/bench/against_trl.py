"""Measures steps that learn from rewards and preferences against TRL's trainers.

    python -m scripts.bench.against_trl --torch_python .venv-torch/bin/python

`rewards` samples 64 tokens after each of 8 prompts 8 times with GPT-2's small shape and
a LoRA, and learns from them (GRPO). `preferences` and `preferences_lora` are steps of
DPO on 8 pairs with the Llama of `scripts.bench`, with 100 vectors or a LoRA. Weights
are random, and both sides take turns. `--reduced` runs small models, which only shows
that both sides work.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from scripts.bench.trl_cases import CASES, reduced, write_case
from scripts.bench.workers import Worker, take_turns


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch_python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=5, help="measured turns")
    parser.add_argument("--reduced", action="store_true", help="run small models")
    options = parser.parse_args()
    print("| case | TRL s | ours s | faster | TRL MiB | ours MiB | memory |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only:
        case = reduced(CASES[name]) if options.reduced else CASES[name]
        with tempfile.TemporaryDirectory() as text:
            print(measure(name, case, Path(text), options), flush=True)


def measure(name, case, folder: Path, options: argparse.Namespace) -> str:
    """Returns a case's row of the table."""
    write_case(case, folder)
    commands = {
        "trl": (options.torch_python, "trl_step"),
        "ours": (sys.executable, "our_learner"),
    }
    workers: dict[str, Worker] = {}
    try:
        # TRL's side writes the model that ours reads.
        for side, (python, module) in commands.items():
            command = [python, "-m", f"scripts.bench.{module}", str(folder)]
            workers[side] = Worker(side, command)
            workers[side].ask("start")
        take_turns(workers, 2)  # compiles
        turns = take_turns(workers, options.steps)
        peaks = {side: w.ask("memory")["bytes"] for side, w in workers.items()}
    finally:
        for worker in workers.values():
            worker.end()
    seconds = {side: [turn.seconds for turn in turns[side]] for side in workers}
    pairs = zip(seconds["trl"], seconds["ours"], strict=True)
    faster = statistics.median(a / b for a, b in pairs)
    times = [statistics.median(seconds[side]) for side in ("trl", "ours")]
    sizes = [peaks[side] / 2**20 for side in ("trl", "ours")]
    return (
        f"| {name} | {times[0]:.2f} | {times[1]:.2f} | {faster:.1f} x | {sizes[0]:.0f} "
        f"| {sizes[1]:.0f} | {sizes[1] / sizes[0]:.2f} |"
    )


if __name__ == "__main__":
    main()
