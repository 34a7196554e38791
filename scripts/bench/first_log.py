"""How long the quickstart takes from launch to its first line of the log.

The first run compiles into an empty cache; the second finds it full. The first line
comes with the tenth step, so the first step is earlier than what is reported here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench.workers import ROOT, WorkerError

LONGEST = 300.0
"""Seconds after which a run that logs nothing is given up."""

EVERY = 0.01


def seconds_to_first_log(folder: Path) -> float:
    """Launches the quickstart and ends it at the first line of its log.

    Args:
      folder: for the run and for the compilation cache, which a later call finds.

    Raises:
      WorkerError: if the run ends or takes too long before it logs a line.
    """
    runs = folder / f"runs-{len(list(folder.glob('runs-*')))}"
    command = [sys.executable, "-m", "scripts.quickstart", "--runs", str(runs)]
    with (folder / "output").open("w+") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while not any(f.stat().st_size for f in runs.rglob("metrics.jsonl")):
                if process.poll() is not None or time.monotonic() - started > LONGEST:
                    output.seek(0)
                    said = output.read()[-2000:]
                    raise WorkerError(f"the quickstart logged nothing:\n{said}")
                time.sleep(EVERY)
            return time.monotonic() - started
        finally:
            process.kill()
            process.wait()
