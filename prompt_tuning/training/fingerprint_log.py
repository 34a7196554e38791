"""The file with fingerprints of the trained parameters, at the steps of a run's log.

`step_fingerprints` computes them; this module reads and writes without JAX.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from prompt_tuning.core.atomic_files import (
    replace_file,
    reporting_disk_errors,
    sync_file,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.typed_json import as_object, parse_json, read_limited

FINGERPRINTS_FILE = "fingerprints.jsonl"
MAXIMUM_BYTES = 2**30
"""Maximum size of the file in bytes."""


class FingerprintLog:
    """Appends one JSON object per fingerprint; a resumed run repeats no line."""

    def __init__(self, directory: Path, after_step: int):
        """Opens the file and removes what a run repeats that goes on after a step.

        Raises:
          InputError: if the file is a link out of the directory.
        """
        self._file = directory / FINGERPRINTS_FILE
        check_links(directory, FINGERPRINTS_FILE)
        with reporting_disk_errors(self._file):
            if self._file.exists():
                kept = [
                    line + b"\n"
                    for line, step, _ in _parsed_lines(self._file)
                    if step <= after_step and after_step > 0
                ]
                replace_file(self._file, b"".join(kept).decode())
            self._lines = self._file.open("a")

    def write(self, step: int, fingerprint: str) -> None:
        """Writes the fingerprint of the trained parameters after a step."""
        line = {"step": step, "trained": fingerprint}
        with reporting_disk_errors(self._file):
            self._lines.write(json.dumps(line) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Flushes the lines to the disk."""
        with reporting_disk_errors(self._file):
            sync_file(self._lines)

    def close(self) -> None:
        """Closes the file."""
        with reporting_disk_errors(self._file):
            self._lines.close()


def read_fingerprints(directory: Path) -> dict[int, str]:
    """Reads the fingerprints of a run by step; empty if it recorded none.

    Lines that a kill truncated are left out.

    Raises:
      InputError: if the file cannot be read.
    """
    file = directory / FINGERPRINTS_FILE
    if not file.exists():
        return {}
    check_links(directory, FINGERPRINTS_FILE)
    return {step: text for _, step, text in _parsed_lines(file)}


def _parsed_lines(file: Path) -> Iterator[tuple[bytes, int, str]]:
    """Yields each whole line of the file, its step and its fingerprint."""
    for number, line in enumerate(read_limited(file, MAXIMUM_BYTES).splitlines(), 1):
        source = f"line {number} of {file}"
        try:
            content = parse_json(line, source)
        except InputError:
            continue
        values = as_object(content, source)
        yield line, values.integer("step"), values.text("trained")
