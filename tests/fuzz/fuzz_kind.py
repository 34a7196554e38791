"""A kind of input: how a valid one is written, damaged and read."""

import contextlib
import dataclasses
import io
import random
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError, StorageError
from tests.fuzz.mutations import Mutation, replace_path

UNDAMAGED = "undamaged"
SHORT = 2
"""Length of names of files, such as "0", that a message may have by chance."""
REPLACED = 0.06
"""Share of cases in which something else lies under a file's name."""


def file_names(folder: Path) -> set[str]:
    """Returns the names of the files in a folder; short ones with the folder's."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {f.name if len(f.name) > SHORT else f"{folder.name}/{f}" for f in files}


def file_and_folder_names(folder: Path) -> set[str]:
    """Returns the names of the files, and the folder, whose files are one thing."""
    return {str(folder), *file_names(folder)}


def file_names_and(option: str, folder: Path) -> set[str]:
    """Returns the names of the files, and an option that they are given by."""
    return {option, *file_names(folder)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of input that users bring.

    Attributes:
      name: name in tables and in `--kind`.
      write: writes a valid input into an empty folder, once.
      files: how files are damaged, by their pattern below the folder.
      read: reads the folder as the package does; raises `InputError` for damage.
      replaceable: whether something else may lie under a file's name; not if the file
        only holds arguments for `read`.
      names: texts of which a refusal has at least one, such as the names of files, from
        the folder before and after the damage; empty if nothing has a name.
      prepare: does what takes long and is done once in a process, before any case, with
        a folder of valid input; None for nothing.
    """

    name: str
    write: Callable[[Path], object]
    files: Mapping[str, Mutation]
    read: Callable[[Path], object]
    replaceable: bool = True
    names: Callable[[Path], Collection[str]] = file_names
    prepare: Callable[[Path], object] | None = None

    def damage(self, seed: int, case: int, folder: Path) -> str:
        """Damages one file of a folder; returns its path below the folder, and how.

        Case 0 is not damaged.
        """
        if case == 0:
            return UNDAMAGED
        rng = random.Random(f"{seed} {self.name} {case}")
        pattern, mutation = rng.choice(list(self.files.items()))
        file = rng.choice(sorted(filter(Path.is_file, folder.glob(pattern))))
        if self.replaceable and rng.random() < REPLACED:
            return f"{file.relative_to(folder)}: {replace_path(rng, file)}"
        data = file.read_bytes()
        count = rng.choice((1, 1, 1, 2, 4))
        for _ in range(count):
            data = mutation(rng, data)
        file.write_bytes(data)
        return f"{file.relative_to(folder)}: {count} by {mutation.__name__}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one case.

    Attributes:
      kind: name of the kind.
      case: number of the case.
      result: "accepted", "refused", or the reason for which the case failed.
      details: the damage, and the message or traceback.
      seconds: time of reading.
      megabytes: memory in use at its peak, above that before.
    """

    kind: str
    case: int
    result: str
    details: str
    seconds: float
    megabytes: float

    @property
    def failed(self) -> bool:
        """Whether the package did not accept or refuse the input as it should."""
        return self.result not in ("accepted", "refused")


def run_command(*arguments: object) -> str:
    """Runs the command in this process and returns its output.

    Raises:
      InputError: with the message, if the command refuses its input.
      StorageError: with the message, for exit code 1.
    """
    from prompt_tuning.cli.main import main

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # argparse
            code = stopped.code
    if code == 2:
        raise InputError(errors.getvalue())
    if code == 1:
        raise StorageError(errors.getvalue())
    assert code == 0, f"exit code {code}: {errors.getvalue()}"
    return output.getvalue()


def copy_files(source: Path, folder: Path, names: Sequence[str] = ()) -> None:
    """Copies the files of a folder, or only some of them."""
    for path in source.iterdir():
        if path.is_file() and (not names or path.name in names):
            shutil.copy(path, folder)
