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
import random
import shutil
import sys
import tempfile
from pathlib import Path

from scripts.crashes.full_disks import run_full_disks
from scripts.crashes.kills import run_kills
from scripts.crashes.pairs import run_pairs
from scripts.crashes.scenarios import (
    fork_writing_inputs,
    import_package,
    make_scenarios,
)


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
        import_package(folder)
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
            failed |= run_pairs(folder, options.pairs, randomness)
        if options.disk_sizes:
            sizes = options.disk_sizes
            failed |= run_full_disks(folder, scenarios, sizes, randomness)
    finally:
        if options.keep:
            print(f"kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
