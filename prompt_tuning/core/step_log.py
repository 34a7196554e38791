"""A file with one JSON object per line, each about one step of a run."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from prompt_tuning.core import atomic_files, typed_json
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.typed_json import JsonObject

Content = TypeVar("Content")
OnDamage = Callable[[str], None]


class StepLog:
    """Appends lines to a file, after those that a resumed run keeps.

    Args:
      file: path of the file, which is created if missing.
      kept: whole lines of the file to keep; the rest are removed.
    """

    def __init__(self, file: Path, kept: Iterable[bytes]):
        self._file = file
        with atomic_files.reporting_disk_errors(file):
            atomic_files.replace_file(file, b"".join(line + b"\n" for line in kept))
            atomic_files.sync_path(file.parent)
            # Half of a surrogate pair becomes its escape in JSON.
            self._lines = file.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, *values: Mapping[str, Any]) -> None:
        """Writes a line for each object; they survive a kill."""
        with atomic_files.reporting_disk_errors(self._file):
            for line in values:
                self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._lines.flush()

    def sync(self) -> None:
        """Flushes the lines to the disk.

        Call it before a checkpoint is published: a power cut must not leave a
        checkpoint without the lines of the steps before it.
        """
        with atomic_files.reporting_disk_errors(self._file):
            atomic_files.sync_file(self._lines)

    def close(self) -> None:
        """Closes the file."""
        with atomic_files.reporting_disk_errors(self._file):
            self._lines.close()


def read_lines(
    file: Path,
    parse: Callable[[JsonObject], Content],
    maximum_bytes: int,
    on_damage: OnDamage | None = None,
) -> Iterator[tuple[bytes, Content]]:
    """Yields each line of a file of steps, raw and parsed.

    Skips a line that a kill truncated. A missing file has no lines.

    Args:
      file: path of the file.
      parse: reads the object in a line.
      maximum_bytes: maximum size of the file.
      on_damage: called with a message for each skipped line; if given, lines that
        `parse` refuses are skipped, too.

    Raises:
      InputError: if the file is a link out of its directory or cannot be read, and for
        a line that `parse` refuses.
    """
    check_links(file.parent, file.name)
    if not file.exists():
        return
    for number, line in enumerate(
        typed_json.read_limited(file, maximum_bytes).splitlines(), 1
    ):
        source = f"line {number} of {file}"
        try:
            content = typed_json.parse_json(line, source)
        except InputError as problem:
            if on_damage is not None:
                on_damage(str(problem))
            continue
        try:
            parsed = parse(typed_json.as_object(content, source))
        except InputError as problem:
            if on_damage is None:
                raise
            on_damage(str(problem))
            continue
        yield line, parsed
