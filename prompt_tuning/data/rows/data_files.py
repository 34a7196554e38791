"""Names of data files; what they contain is read by other modules."""

from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError

HDF5_SUFFIXES = (".hdf5", ".h5")
JSONL_SUFFIX = ".jsonl"

Files = str | Path | Sequence[str | Path]


def list_files(files: Files) -> list[Path]:
    """Returns one file or several as a list of existing paths.

    Raises:
      InputError: if the list is empty, or a file is missing.
    """
    several = [files] if isinstance(files, str | Path) else list(files)
    paths = [Path(file) for file in several]
    if not paths:
        raise InputError("data files: the list is empty, expected at least one file")
    for path in paths:
        if not path.is_file():
            state = "is a folder, expected a file" if path.is_dir() else "not found"
            raise InputError(f"data file {path} {state}")
    return paths


def contains_text(files: Files) -> bool:
    """Returns whether data files are jsonl files of text, or else HDF5 files of ids.

    Raises:
      InputError: if they are of neither kind or of both.
    """
    paths = list_files(files)
    kinds = {"hdf5" if p.suffix in HDF5_SUFFIXES else p.suffix for p in paths}
    if kinds not in ({"hdf5"}, {JSONL_SUFFIX}):
        raise InputError(
            f"data files {[str(path) for path in paths]}: expected all to end in "
            f".hdf5 or .h5, or all in {JSONL_SUFFIX}"
        )
    return kinds == {JSONL_SUFFIX}
