"""Reads randomly damaged inputs of every kind, up to a given time or number of cases.

    .venv/bin/python -m scripts.fuzz --minutes 10 --seed 1

Every case damages a valid input at random and reads it in a monitored process. A case
fails if reading ends with anything but success or one message, takes more than 20
seconds or 1 GiB, starts a program, connects to a network, or writes outside its folder,
or if the message does not name a file or an option.
"""

import argparse
import collections
import sys
import time

from rich.console import Console
from rich.progress import Progress

from tests.fuzz.fuzz_runner import damaged_copy, describe, fuzz, table
from tests.fuzz.kinds import KINDS


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="time limit (none)")
    parser.add_argument(
        "--cases", type=int, default=10_000, help="number of cases (10000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage (0)")
    parser.add_argument(
        "--kind", action="append", choices=sorted(KINDS), help="only these kinds"
    )
    parser.add_argument("--case", type=int, help="repeat this case of one --kind")
    parser.add_argument(
        "--failures", type=int, default=3, help="failures printed for each kind (3)"
    )
    return parser.parse_args()


def main() -> int:
    """Runs the cases, and returns 1 if one failed."""
    options = parse_arguments()
    kinds = [KINDS[name] for name in options.kind or KINDS]
    seconds = float("inf") if options.minutes is None else 60 * options.minutes
    if options.case is not None:
        (outcome,) = fuzz(kinds, options.seed, 1, first=options.case)
        print(describe(outcome, options.seed))
        with damaged_copy(kinds[0], options.seed, options.case) as folder:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.stat().st_size < 2000:
                    print(f"--- {file.relative_to(folder)}\n{file.read_bytes()!r}")
        return int(outcome.failed)
    cases = -(-options.cases // len(kinds))
    outcomes, printed = [], collections.Counter()
    start = time.monotonic()
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("fuzzing", total=cases * len(kinds))
        for outcome in fuzz(kinds, options.seed, cases, seconds=seconds):
            outcomes.append(outcome)
            progress.advance(task)
            if outcome.failed and printed[outcome.kind] < options.failures:
                printed[outcome.kind] += 1
                progress.console.out(describe(outcome, options.seed) + "\n")
    print(table(outcomes))
    print(f"seed {options.seed}, {time.monotonic() - start:.0f} s")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
