"""Measures the time from the quickstart's launch to the end of its first step.

    python -m scripts.bench.start_up --runs 3

The first run compiles all programs; later runs read them from the compilation cache.
Each run is a separate process that is stopped after its first step.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

from scripts.skill_tuning import FIRST_STEP_DONE


def main() -> None:
    """Launches the quickstart several times over one new cache."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="number of launches")
    parser.add_argument("--model", choices=("decoder", "t5"), default="decoder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, arguments.runs + 1):
            seconds = seconds_to_first_step(arguments.model, folder)
            kind = "compiles" if number == 1 else "reads the cache"
            print(f"run {number}, which {kind}: {seconds:.2f} s to the first step")


def seconds_to_first_step(model: str, folder: str) -> float:
    """Launches the quickstart once, with its cache and its runs in a folder."""
    command = [sys.executable, "-u", "-m", "scripts.quickstart", "--model", model]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, "--skills", "upper", "--runs", f"{folder}/runs"],
        env=environment | {"XDG_CACHE_HOME": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith(FIRST_STEP_DONE):
                seconds = time.monotonic() - started
                process.kill()
                return seconds
    raise RuntimeError(
        f"the quickstart exited with code {process.returncode} before its first step"
    )


if __name__ == "__main__":
    main()
