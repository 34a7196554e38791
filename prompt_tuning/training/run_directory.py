"""A run directory belongs to one config and one frozen model, and says so."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, differences
from prompt_tuning.processes.group import is_first, run_on_first

CONFIG_FILE = "config.gin"
IDENTITY_FILE = "run.json"

_COMPUTATION = re.compile(
    r"(\w+/)*(Run\.(mesh|checkpoint_form)|(MeshShape|AxisRules|Rematerialization)\.\w+"
    r"|Pretrained\.(weights|(encoder_)?rematerialization))\s*="
)


def claim(
    directory: Path, config: str, frozen_model: str, record: dict[str, Any]
) -> None:
    """Takes a new directory for a run, or checks that an old one is this run's.

    Args:
      directory: made if it is missing.
      config: the operative config; see `decisive` for what counts of it.
      frozen_model: the frozen model's fingerprint.
      record: JSON that is kept with it.

    Raises:
      InputError: if the directory belongs to another config or model; nothing in it has
        been touched.
    """
    known = directory / IDENTITY_FILE
    if known.exists():
        _check_config(directory, config)
        check_model(directory, frozen_model)
        return
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, expected a directory or nothing")
    content = {"frozen_model": frozen_model, **record}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / CONFIG_FILE, config)
        replace_file(known, json.dumps(content, indent=2, sort_keys=True) + "\n")
    except OSError as problem:
        raise InputError(
            f"{directory} cannot be written to: {problem}; choose another "
            "Run.directory, or see who may write there"
        ) from problem


def open_store(run: Run) -> CheckpointStore:
    """The run's checkpoints, mended where a kill left something half done.

    Of several processes the first alone mends and writes.
    """
    writes = is_first()
    store = CheckpointStore(
        run.directory,
        run.keep_last,
        run.keep_best,
        form=run.checkpoint_form,
        read_only=not writes,
    )
    # None reads before the first is done with mending.
    run_on_first(lambda: None)
    return store


def _check_config(directory: Path, config: str) -> None:
    file = directory / CONFIG_FILE
    found = file.read_text() if file.exists() else ""
    differing = differences(decisive_lines(found), decisive_lines(config))
    if differing:
        shown = "\n  ".join(differing)
        raise InputError(
            f"{directory} belongs to a run with another config (- that run's, + this "
            f"one's):\n  {shown}\nchoose another Run.directory, or start that run "
            f"again with --gin_file {file}"
        )


def relevant_lines(config: str) -> list[str]:
    """A config's lines without comments and those that name the run's directory."""
    # gin breaks a long value off, and all that is behind a break stands further in.
    whole = re.sub(r"\s*\\?\n\s+", " ", config)
    return [
        line
        for line in whole.splitlines()
        if line and not line.startswith(("#", "Run.directory", "RUN_DIRECTORY"))
    ]


def decisive_lines(config: str) -> list[str]:
    """Its relevant lines without those that say where and in which order it computes.

    A run goes on with others of these: its results change by rounding at most.
    """
    lines = relevant_lines(config)
    kept = [line for line in lines if not _COMPUTATION.match(line)]
    others = set(lines).difference(kept)
    macros = _macros(others) - _macros(kept)
    return [line for line in kept if line.partition(" = ")[0] not in macros]


def _macros(lines: Iterable[str]) -> set[str]:
    """The names that lines take values from."""
    return {name for line in lines for name in re.findall(r"%([\w./]+)", line)}


def check_model(directory: Path, frozen_model: str) -> None:
    """Compares a frozen model's fingerprint with that of the directory's run.

    Raises:
      InputError: if the run's model is another.
    """
    found = recorded_model(directory)
    if found != frozen_model:
        raise InputError(
            f"{directory} belongs to a run with another frozen_model: found the "
            f"fingerprint {found}, and this run's is {frozen_model}; choose another "
            "Run.directory"
        )


def recorded_model(directory: Path) -> str | None:
    """The fingerprint of the frozen model of a directory's run; None for no run."""
    file = directory / IDENTITY_FILE
    known = json.loads(file.read_text()) if file.exists() else {}
    return known.get("frozen_model")
