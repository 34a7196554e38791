"""The log of the trained parameters' fingerprints, at the steps of a run's log.

`step_fingerprints` computes them; this module reads and writes without JAX.
"""

from pathlib import Path

from prompt_tuning.core.step_log import StepLog, read_lines
from prompt_tuning.core.typed_json import JsonObject

FINGERPRINTS_FILE = "fingerprints.jsonl"
MAXIMUM_BYTES = 2**30
"""Maximum size of the file in bytes."""


def open_fingerprints(directory: Path, after_step: int) -> StepLog:
    """Opens the file, and removes the lines after a step, which the run repeats.

    Raises:
      InputError: if the file is a link out of the directory, or damaged.
    """
    file = directory / FINGERPRINTS_FILE
    lines = list(read_lines(file, _fingerprint, MAXIMUM_BYTES))
    # A run that starts over writes the fingerprint of step 0 again.
    kept = [line for line, (step, _) in lines if step <= after_step and after_step > 0]
    return StepLog(file, kept)


def fingerprint_line(step: int, fingerprint: str) -> dict[str, int | str]:
    """Returns the line for the trained parameters after a step."""
    return {"step": step, "trained": fingerprint}


def read_fingerprints(directory: Path) -> dict[int, str]:
    """Reads the fingerprints of a run by step; empty if it recorded none.

    Lines that a kill truncated are skipped.

    Raises:
      InputError: if the file cannot be read.
    """
    lines = read_lines(directory / FINGERPRINTS_FILE, _fingerprint, MAXIMUM_BYTES)
    return dict(content for _, content in lines)


def _fingerprint(line: JsonObject) -> tuple[int, str]:
    return line.integer("step"), line.text("trained")
