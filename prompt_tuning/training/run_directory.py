"""Bind a run directory to one config and one frozen model."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.checkpoints.run_store.kept_prompts import KeptPrompts
from prompt_tuning.config.config_changes import ConfigChanges, compare_configs
from prompt_tuning.config.config_values import CONFIG_FILE, IDENTITY_FILE
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.recorded_paths import RecordedPaths, with_header
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import replace_file, reporting_disk_errors
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_locks import hold_lock
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import read_limited, read_object
from prompt_tuning.data.source_reading import files_of
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer
from prompt_tuning.pretrained.checkpoint_path import find_checkpoint, hub_name_of
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.processes.group import is_first, run_on_first

REVISION = "model_revision"
"""Field of a run's record with the commit of a frozen model from the hub."""
TOKENIZER_FILE = "tokenizer.json"
"""Tokenizer of a run with new tokens, in the format of the library tokenizers."""
LOCK_FILE = ".writer.lock"
DATA_FILES = "data_files"
"""Field of a run's record with the names of the data files, in order."""


@contextlib.contextmanager
def hold_run(*directories: Path | str) -> Iterator[None]:
    """Holds run directories so that no other command writes to them.

    Every command that writes to a run directory does so within this context, in the
    first process. The lock of a killed process counts as free.

    Args:
      directories: run directories; created if needed, and removed if they stay empty.
        An empty text names none.

    Raises:
      InputError: in every process, if another command writes to one of the directories.
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


def claim_run(
    run: Run,
    model: PromptedModel,
    config: str,
    frozen_model: str,
    record: dict[str, Any],
) -> ConfigChanges:
    """Claims the directory of an opened run, in the first process; see `claim`.

    The tokenizer of a run with new tokens is written, too. `record` has JSON values to
    add to those of `run_record`.
    """

    def claim_first() -> dict[str, Any]:
        directory = Path(run.directory)
        changes = claim(directory, config, frozen_model, run_record(run) | record)
        _keep_tokenizer(directory, model)
        return vars(changes)

    return ConfigChanges(**run_on_first(claim_first))


def claim(
    directory: Path, config: str, frozen_model: str, record: dict[str, Any]
) -> ConfigChanges:
    """Claims a new directory for a run, or checks that an existing one is this run's.

    Returns the differences from the config of an existing run; see `replace_config`.

    Raises:
      InputError: if the directory belongs to another config or model, or to a run on
        other files; it is then unchanged.
    """
    changes = check_owner(directory, config, frozen_model)
    if changes is not None:
        _check_data(record, directory / IDENTITY_FILE)
        return changes
    content = {"frozen_model": frozen_model, **record}
    with reporting_disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(directory / CONFIG_FILE, with_header(config))
        replace_file(
            directory / IDENTITY_FILE,
            json.dumps(content, indent=2, sort_keys=True) + "\n",
        )
    return ConfigChanges()


def _keep_tokenizer(directory: Path, model: PromptedModel) -> None:
    """Writes the tokenizer of a run that adds tokens, for other programs."""
    tokenizer = model.tokenizer
    if model.prompts.tokens is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    with reporting_disk_errors(directory):
        replace_file(
            directory / TOKENIZER_FILE, tokenizer.tokenizer.to_str(pretty=True)
        )


def _check_data(record: Mapping[str, Any], file: Path) -> None:
    """Checks that a run resumes with the files that it started with.

    `record` is the `run_record` of the run; `file`, the record in its directory, may
    not exist.
    """
    if not file.exists():
        return
    recorded = read_object(file).value(DATA_FILES, None)
    now = record.get(DATA_FILES)
    if recorded is not None and now is not None and recorded != now:
        raise InputError(
            f"{file.parent} belongs to a run that was started with the training files "
            f"{shown(recorded)}, and its glob or folder now stands for {shown(now)}; "
            "restore the files, or choose another directory, "
            f"{how_to_set('Run.directory', 'DIRECTORY')}"
        )


def replace_config(directory: Path, config: str) -> None:
    """Replaces the config of a run that continues with allowed changes."""
    with reporting_disk_errors(directory):
        replace_file(directory / CONFIG_FILE, with_header(config))


def check_owner(
    directory: Path, config: str, frozen_model: str
) -> ConfigChanges | None:
    """Checks that a directory is new or belongs to this run; writes nothing.

    Returns the differences from the config in the directory; None if it has no run.

    Raises:
      InputError: if the directory belongs to another config or model.
    """
    if (directory / IDENTITY_FILE).exists():
        changes = _check_config(directory, config)
        check_model(directory, frozen_model)
        return changes
    _check_directory(directory)
    return None


def check_resumable(run: Run, config: str) -> None:
    """Checks the settings of a run that resumes, before its model is read.

    Args:
      run: the run.
      config: the config; values may be missing and are then not compared.

    Raises:
      InputError: if the directory belongs to another config, or the run has already
        taken more steps than requested.
    """
    directory = Path(run.directory)
    if (directory / IDENTITY_FILE).exists():
        _check_config(directory, config, complete=False)
        check_steps(directory, max(steps_in(directory / FOLDER), default=0), run.steps)


def check_steps(directory: Path, done: int, steps: int) -> None:
    """Checks that a run has not already taken more steps than requested.

    Raises:
      InputError: if it has.
    """
    if done > steps:
        raise InputError(
            f"{directory} has taken {done} steps, more than Run.steps = {steps}, and "
            "steps are not undone: train the shorter run in another directory, "
            f"{how_to_set('Run.directory', 'DIRECTORY')}"
        )


def open_store(run: Run, spare: int = 0) -> CheckpointStore:
    """Opens the run's checkpoints, and repairs what an interrupted save left behind.

    Only the first process repairs and writes. `spare` checkpoints are kept in addition
    to `Run.keep_last`.
    """
    writes = is_first()
    store = CheckpointStore(
        run.directory,
        run.keep_last + spare,
        run.best_by,
        form=run.checkpoint_form,
        kept_prompts=KeptPrompts(run.keep_prompts, run.save_paths),
        read_only=not writes,
    )
    # Other processes must not read before the first one has finished its repairs.
    run_on_first(lambda: None)
    return store


def _check_config(
    directory: Path, config: str, *, complete: bool = True
) -> ConfigChanges:
    file = directory / CONFIG_FILE
    content = read_limited(file, MAXIMUM_BYTES) if file.exists() else b""
    # Bytes that are not UTF-8 differ from any config.
    recorded = content.decode(errors="replace")
    paths = RecordedPaths.read(directory, recorded)
    changes = compare_configs(recorded, config, paths.locate, complete=complete)
    if changes.learning:
        lines = "\n  ".join(changes.learning)
        raise InputError(
            f"{directory} belongs to a run with another config, and what it has "
            f"learned depends on these settings:\n  {lines}\n"
            "To train with them, choose another directory by "
            f"{how_to_set('Run.directory', 'DIRECTORY')}; the new run may start from "
            "the result of this one by "
            f"{how_to_set('Run.start_from', str(directory))}. To resume this one "
            f"unchanged: prompt-tuning train --run {directory}"
        )
    return changes


def run_record(run: Run) -> dict[str, Any]:
    """Returns the record of a run's settings.

    It has the commit of a frozen model from the hub, and the files that globs and
    folders of training data stand for: a run that resumed after files were added to a
    folder would read other rows.
    """
    name = hub_name_of(run.model.checkpoint)
    record = (
        {} if name is None else {REVISION: find_checkpoint(run.model.checkpoint).name}
    )
    if run.data is None:
        return record
    files = [run.data.files] if isinstance(run.data.files, str) else run.data.files
    paths = files_of(run.data)
    if paths == [Path(name) for name in files]:
        return record
    return {DATA_FILES: [path.name for path in paths], **record}


def check_model(directory: Path, frozen_model: str) -> None:
    """Checks that a frozen model is that of the directory's run.

    Raises:
      InputError: if the fingerprints differ.
    """
    recorded = recorded_model(directory)
    if recorded != frozen_model:
        raise InputError(
            f"{directory} belongs to a run with another frozen_model: its "
            f"{IDENTITY_FILE} has the fingerprint {shown(recorded)}, and this run's is "
            f"{frozen_model}"
            f"{_revision_hint(directory)}; choose "
            f"another directory, {how_to_set('Run.directory', 'DIRECTORY')}"
        )


def _revision_hint(directory: Path) -> str:
    revision = read_object(directory / IDENTITY_FILE).text(REVISION, None)
    return "" if revision is None else f" (its revision was {shown(revision)})"


def recorded_model(directory: Path) -> str | None:
    """Returns the fingerprint of a run's frozen model; None without a run."""
    file = directory / IDENTITY_FILE
    return read_object(file).text("frozen_model", None) if file.exists() else None
