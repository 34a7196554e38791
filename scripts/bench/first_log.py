"""Measures the time from the quickstart's launch to the first line of its log.

The first run compiles into an empty cache; the second reads that cache. The first line
is written at step 10, so the first step ends earlier than the reported time.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.bench.workers import ROOT, WorkerError

LONGEST = 300.0
"""Seconds after which a run that logs nothing is stopped."""

EVERY = 0.01


def seconds_to_first_log(folder: Path) -> float:
    """Launches the quickstart and ends it at the first line of its log.

    Args:
      folder: folder of the run and of the compilation cache, which later calls reuse.

    Raises:
      WorkerError: if the run ends or times out before it logs a line.
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
                    log = output.read()[-2000:]
                    raise WorkerError(f"the quickstart logged nothing:\n{log}")
                time.sleep(EVERY)
            return time.monotonic() - started
        finally:
            process.kill()
            process.wait()
