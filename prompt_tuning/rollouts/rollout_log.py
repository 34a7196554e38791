"""The answers of a run, with their rewards if there are some: `rollouts.jsonl`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.atomic_files import (
    replace_file,
    reporting_disk_errors,
    sync_file,
    sync_path,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.typed_json import as_object, parse_json, read_limited

ROLLOUTS_FILE = "rollouts.jsonl"
MAXIMUM_LOG = 2**32
"""Maximum size of the file in bytes."""


class RolloutLog:
    """Appends one JSON object for each answer; a resumed run repeats none.

    Attributes:
      equal: number of rollouts at the end of the file from which nothing is learned.

    Args:
      directory: run directory.
      after_step: number of completed steps; answers of later ones are removed.

    Raises:
      InputError: if the file is a link out of the directory, or damaged.
    """

    def __init__(self, directory: Path, after_step: int):
        check_links(directory, ROLLOUTS_FILE)
        self._path, self.equal = directory / ROLLOUTS_FILE, 0
        with reporting_disk_errors(self._path):
            kept, learned = [], {}
            if self._path.exists():
                for line, step, advantage in _answers(self._path):
                    if step <= after_step:
                        kept.append(line + b"\n")
                        learned[step] = learned.get(step, False) or advantage != 0
                replace_file(self._path, b"".join(kept))
            for step in sorted(learned, reverse=True):
                if learned[step]:
                    break
                self.equal += 1
            self._path.touch()
            sync_path(directory)
            self._lines = self._path.open("a", encoding="utf-8")

    def write(self, answers: Sequence[Mapping[str, Any]], *, equal: bool) -> None:
        """Writes the answers of a rollout.

        Args:
          answers: fields of each.
          equal: whether nothing is learned from them.
        """
        self.equal = self.equal + 1 if equal else 0
        with reporting_disk_errors(self._path):
            for answer in answers:
                self._lines.write(json.dumps(answer, ensure_ascii=False) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Flushes the lines to the disk, before a checkpoint of their step."""
        with reporting_disk_errors(self._path):
            sync_file(self._lines)

    def close(self) -> None:
        """Closes the file."""
        with reporting_disk_errors(self._path):
            self._lines.close()


def _answers(path: Path) -> Iterator[tuple[bytes, int, float | None]]:
    """Yields each line with its step and advantage, if it has one.

    A line that a kill cut is left out.
    """
    for number, line in enumerate(read_limited(path, MAXIMUM_LOG).splitlines(), 1):
        source = f"line {number} of {path}"
        try:
            content = parse_json(line, source)
        except InputError:
            continue
        fields = as_object(content, source)
        yield line, fields.integer("step"), fields.number("advantage", None)
