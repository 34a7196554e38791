"""Records the files that globs and folders of training data stand for.

A run that is resumed after files were added to a folder would read other rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import read_object

FIELD = "data_files"
"""Field of a run's record with the names of the files, in order."""


def data_record(run: Run) -> dict[str, Any]:
    """Returns the field of a run's record; empty if the config names every file."""
    if run.data is None:
        return {}
    given = [run.data.files] if isinstance(run.data.files, str) else run.data.files
    paths = run.data.paths
    if paths == [Path(name) for name in given]:
        return {}
    return {FIELD: [path.name for path in paths]}


def check_data(record: Mapping[str, Any], file: Path) -> None:
    """Checks that a run resumes with the files that it was started with.

    Args:
      record: `data_record` of the run.
      file: record of the run in its directory, which may not exist.

    Raises:
      InputError: if the files differ.
    """
    if not file.exists():
        return
    before = read_object(file).value(FIELD, None)
    now = record.get(FIELD)
    if before is not None and now is not None and before != now:
        raise InputError(
            f"{file.parent} belongs to a run that was started with the training files "
            f"{shown(before)}, and its glob or folder now stands for {shown(now)}; "
            "restore the files, or choose another directory, "
            f"{how_to_set('Run.directory', 'DIRECTORY')}"
        )
