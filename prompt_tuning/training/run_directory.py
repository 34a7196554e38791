"""Binds a run directory to one config and one frozen model."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.run import CONFIG_FILE, Run
from prompt_tuning.core.atomic_files import replace_file, reporting_disk_errors
from prompt_tuning.core.errors import InputError, differences, shown
from prompt_tuning.core.file_locks import hold_lock
from prompt_tuning.core.typed_json import read_limited, read_object
from prompt_tuning.processes.group import is_first, run_on_first

IDENTITY_FILE = "run.json"
LOCK_FILE = ".writer.lock"
_COMPUTATION = re.compile(
    r"(\w+/)*(Run\.(mesh|checkpoint_form)|(MeshShape|AxisRules|Rematerialization)\.\w+"
    r"|Pretrained\.(weights|(encoder_)?rematerialization))\s*="
)


@contextlib.contextmanager
def hold_run(*directories: Path | str) -> Iterator[None]:
    """Holds run directories, so that no other command writes them at the same time.

    Every command that writes a run directory does it within this, in the first of
    several processes. A lock that a killed process left is free.

    Args:
      directories: run directories; created if needed, and removed if they stay empty.
        An empty text names none.

    Raises:
      InputError: in every process, if another command writes one of the directories.
    """
    with contextlib.ExitStack() as held:

        def hold() -> None:
            for directory in map(Path, filter(None, directories)):
                with reporting_disk_errors(directory):
                    _check_directory(directory)
                    held.enter_context(
                        hold_lock(directory / LOCK_FILE, f"run directory {directory}")
                    )

        run_on_first(hold)
        yield


def _check_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, expected a directory or nothing")


def claim(
    directory: Path, config: str, frozen_model: str, record: dict[str, Any]
) -> None:
    """Claims a new directory for a run, or checks that an existing one is this run's.

    Args:
      directory: run directory; created if it is missing.
      config: the operative config, compared as `decisive_lines` describes.
      frozen_model: fingerprint of the frozen model.
      record: JSON that is stored with it.

    Raises:
      InputError: if the directory belongs to another config or model; it is then left
        unchanged.
    """
    if check_owner(directory, config, frozen_model):
        return
    content = {"frozen_model": frozen_model, **record}
    with reporting_disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / CONFIG_FILE, config)
        replace_file(
            directory / IDENTITY_FILE,
            json.dumps(content, indent=2, sort_keys=True) + "\n",
        )


def check_owner(directory: Path, config: str, frozen_model: str) -> bool:
    """Checks that a directory is new or belongs to this run; writes nothing.

    Returns:
      whether the run is in the directory already.

    Raises:
      InputError: if the directory belongs to another config or model.
    """
    if (directory / IDENTITY_FILE).exists():
        _check_config(directory, config)
        check_model(directory, frozen_model)
        return True
    _check_directory(directory)
    return False


def open_store(run: Run) -> CheckpointStore:
    """Opens the run's checkpoints, and repairs what an interrupted save left behind.

    Only the first of several processes repairs and writes.
    """
    writes = is_first()
    store = CheckpointStore(
        run.directory,
        run.keep_last,
        run.keep_best,
        form=run.checkpoint_form,
        read_only=not writes,
    )
    # The others must not read before the first process has finished its repairs.
    run_on_first(lambda: None)
    return store


def _check_config(directory: Path, config: str) -> None:
    file = directory / CONFIG_FILE
    content = read_limited(file, MAXIMUM_BYTES) if file.exists() else b""
    # Bytes that are not UTF-8 differ from those of any config.
    previous = content.decode(errors="replace")
    differing = differences(decisive_lines(previous), decisive_lines(config))
    if differing:
        lines = "\n  ".join(differing)
        raise InputError(
            f"{directory} belongs to a run with another config (- that run's, + this "
            f"one's):\n  {lines}\nchoose another Run.directory, or resume that run "
            f"with --gin_file {file}"
        )


def relevant_lines(config: str) -> list[str]:
    """A config's lines, without comments and without the run directory."""
    # gin wraps long values; continuation lines are indented further.
    # Without the first condition, a long run of spaces would take quadratic time.
    whole = re.sub(r"(?<!\s)\s*\\?\n\s+", " ", config)
    return [
        line
        for line in whole.splitlines()
        if line and not line.startswith(("#", "Run.directory", "RUN_DIRECTORY"))
    ]


def decisive_lines(config: str) -> list[str]:
    """The relevant lines without settings of where and in which order it computes.

    A run can be resumed with other values of these: its results change only by
    rounding.
    """
    lines = relevant_lines(config)
    decisive = [line for line in lines if not _COMPUTATION.match(line)]
    others = set(lines).difference(decisive)
    # Macros that only the omitted lines use are omitted as well.
    macros = _macros(others) - _macros(decisive)
    return [line for line in decisive if line.partition(" = ")[0] not in macros]


def _macros(lines: Iterable[str]) -> set[str]:
    """The names of the macros that lines use."""
    return {name for line in lines for name in re.findall(r"%([\w./]+)", line)}


def check_model(directory: Path, frozen_model: str) -> None:
    """Checks that a frozen model is the one of the directory's run.

    Raises:
      InputError: if the fingerprints differ.
    """
    recorded = recorded_model(directory)
    if recorded != frozen_model:
        raise InputError(
            f"{directory} belongs to a run with another frozen_model: found the "
            f"fingerprint {shown(recorded)}, and this run's is {frozen_model}; choose "
            "another Run.directory"
        )


def recorded_model(directory: Path) -> str | None:
    """The fingerprint of a run's frozen model; None if there is no run."""
    file = directory / IDENTITY_FILE
    return read_object(file).text("frozen_model", None) if file.exists() else None
