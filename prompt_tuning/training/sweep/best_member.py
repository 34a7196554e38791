"""Find the best member of a finished sweep."""

from pathlib import Path

from prompt_tuning.core.file_names import path_within
from prompt_tuning.core.typed_json import read_object

BEST_FILE = "best.json"


def best_member(directory: Path) -> Path | None:
    """Returns the run directory of a sweep's best member; None if there is no sweep.

    Raises:
      InputError: if the file that names it is damaged, or names another folder.
    """
    file = directory / BEST_FILE
    if not file.exists():
        return None
    return path_within(directory, read_object(file).value("directory"), str(file))
