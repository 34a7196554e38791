"""Runs a preparation from its inputs to its output; it can be interrupted anytime."""

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core import atomic_files, field_checks, typed_json
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.progress_display import progress_bar
from prompt_tuning.data.preparation import input_files, scratch_directory, worker_pool
from prompt_tuning.data.preparation.encoding_worker import EncodingWorker
from prompt_tuning.data.preparation.output_files import (
    OutputContents,
    append_skipped,
    is_output_name,
    write_output,
)
from prompt_tuning.data.preparation.preparation_settings import Preparation, WorkerCount
from prompt_tuning.data.preparation.record_index import (
    InputSummary,
    RecordIndex,
    write_index,
)
from prompt_tuning.data.preparation.record_order import record_order
from prompt_tuning.data.preparation.split_writer import FinishedSplit, SplitWriter
from prompt_tuning.data.preparation.tokenizer_files import (
    open_tokenizer,
    tokenizer_files,
)

FORMAT = 3
"""Version of the scratch directory; a directory of another version is not resumed.

It changes with the division of the records into tasks, too, which the shards follow.
"""

MAXIMUM_WORKERS = 16
Progress = contextlib.AbstractContextManager[Callable[[int], None]]
_INDEX, _SUMMARY = "index", "found.json"


def default_workers() -> int:
    """Returns the number of available cores, at most `MAXIMUM_WORKERS`."""
    return min(worker_pool.available_cores(), MAXIMUM_WORKERS)


def prepare(
    preparation: Preparation,
    *,
    workers: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> Path:
    """Writes the output folder, or resumes an interrupted process that was writing it.

    The output's bytes depend only on the preparation and its inputs, not on the number
    of workers or on interruptions. The workers are processes that import the main
    module again, so a script must call this under `if __name__ == "__main__":`.

    Args:
      preparation: settings of the preparation.
      workers: number of processes that read and encode; None for one per core.
      force: whether to replace an output that an earlier preparation wrote.
      progress: whether the progress is shown on a terminal, and remarks are printed.

    Raises:
      InputError: if a setting or an input cannot be used; no output is written then.
    """
    preparation.check()
    workers = default_workers() if workers is None else workers
    field_checks.check_value("workers", workers, WorkerCount)
    files = input_files.find_input_files(
        preparation.inputs, preparation.record, skip=preparation.skip_malformed
    )
    output = Path(preparation.output)
    atomic_files.check_named(output)
    files = input_files.place_lines(files, scratch_directory.scratch_path(output))
    _check_output_location(preparation, files, output)
    worker = EncodingWorker(preparation, files)
    with scratch_directory.open_scratch(output) as scratch:
        if worker.uses_date and preparation.text.chat_date is None:
            preparation = _with_date(preparation, scratch.identity)
            worker = EncodingWorker(preparation, files)
        identity = _identity(preparation, files)
        if scratch.identity == identity and scratch.is_published:
            scratch.remove()
            return output
        _check_output(output, force)
        _check_scratch(scratch, identity, force)
        stages = _PreparationStages(preparation, files, scratch, progress, workers)
        with _removing(scratch):
            stages.run(identity, worker)
            _check_output(output, force)
            scratch.publish()
    return output


@contextlib.contextmanager
def _removing(scratch: scratch_directory.ScratchDirectory) -> Iterator[None]:
    """Removes the scratch directory afterwards, unless the block was interrupted."""
    try:
        yield
    except InputError:
        scratch.remove()
        raise
    scratch.remove()


def _identity(
    preparation: Preparation, files: Sequence[input_files.InputFile]
) -> dict[str, Any]:
    """Returns everything that the output's bytes depend on, as JSON values."""
    template = preparation.text.chat_template
    return {
        "format": FORMAT,
        "preparation": _to_json_values(dataclasses.asdict(preparation)),
        "inputs": input_files.file_versions(files),
        "tokenizer": _stat_files(tokenizer_files(preparation.tokenizer)),
        "chat_template": [] if template is None else _stat_files([Path(template)]),
    }


def _with_date(preparation: Preparation, identity: dict[str, Any]) -> Preparation:
    """Sets the date of the chat template: today, or when resuming the original date."""

    def with_date(date: str) -> Preparation:
        text = dataclasses.replace(preparation.text, chat_date=date)
        return dataclasses.replace(preparation, text=text)

    previous = identity.get("preparation")
    date = previous and previous["text"].get("chat_date")
    if date:
        resumed = with_date(date)
        if _to_json_values(dataclasses.asdict(resumed)) == previous:
            return resumed
    return with_date(datetime.date.today().isoformat())


def _stat_files(paths: Sequence[Path]) -> list[list[Any]]:
    stats = [(str(path), path.stat()) for path in paths]
    return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _to_json_values(value: Any) -> Any:
    """Converts tuples to lists, as JSON returns them when it is read."""
    if isinstance(value, dict):
        return {name: _to_json_values(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_to_json_values(item) for item in value]
    return value


def _check_output(output: Path, force: bool) -> None:
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    replaceable = [name for name in names if is_output_name(name)]
    atomic_files.check_writable(output, known=replaceable, force=force)


def _check_scratch(
    scratch: scratch_directory.ScratchDirectory, identity: dict[str, Any], force: bool
) -> None:
    previous = scratch.identity
    if force or not previous or previous == identity:
        return
    if previous.get("format") != FORMAT:
        raise InputError(
            f"{scratch.path} contains an interrupted preparation of another version of "
            "this package: finish it with that version, or add --force to discard it"
        )
    raise InputError(
        f"{scratch.path} contains an interrupted preparation with other settings or "
        "with inputs that have changed since: repeat its command to resume it, or add "
        "--force to discard it"
    )


def _check_output_location(
    preparation: Preparation, files: Sequence[input_files.InputFile], output: Path
) -> None:
    for name in preparation.inputs:
        folder = Path(name).resolve()
        if folder.is_dir() and output.resolve().is_relative_to(folder):
            raise InputError(
                f"output {output} is inside the input folder {name}, so it would be "
                "read as an input next time: choose a folder elsewhere"
            )
    template = preparation.text.chat_template
    roles = {file.path: "input" for file in files}
    roles[Path(preparation.tokenizer.path)] = "tokenizer"
    if template is not None:
        roles[Path(template)] = "chat template"
    for folder in (output.resolve(), scratch_directory.scratch_path(output).resolve()):
        for path, role in roles.items():
            if path.resolve().is_relative_to(folder):
                raise InputError(
                    f"{role} {path} is inside {folder}, which is replaced when the "
                    "output is written, so it would be lost: choose another output"
                )


@dataclasses.dataclass
class _PreparationStages:
    """The stages of a preparation: index, encode and pack, and write the rest."""

    preparation: Preparation
    files: Sequence[input_files.InputFile]
    scratch: scratch_directory.ScratchDirectory
    progress: bool
    workers: int

    def run(self, identity: dict[str, Any], worker: EncodingWorker) -> None:
        """Runs all stages up to the rename that publishes the output."""
        summary = self.index(identity)
        folder = self.scratch.create_new()
        if self.preparation.skip_malformed:
            append_skipped(folder, summary.problems)
        finished = self.pack(worker, folder)
        if input_files.file_versions(self.files) != identity["inputs"]:
            raise InputError("an input was changed while it was read: start again")
        contents = OutputContents(self.preparation, self.files, summary, finished)
        write_output(contents, folder, self.say)

    def say(self, text: str) -> None:
        if self.progress:
            print(text)

    def bar(self, stage: str, total: int) -> Progress:
        return progress_bar(stage, total, shown=self.progress, in_bytes=True)

    def index(self, identity: dict[str, Any]) -> InputSummary:
        """Finds the records, unless an interrupted process already has."""
        if self.scratch.identity == identity:
            self.say("resuming the interrupted preparation")
        else:
            self.scratch.begin(identity)
        index, found = (self.scratch.path / name for name in (_INDEX, _SUMMARY))
        if not (index.exists() and found.exists()):
            total = sum(file.path.stat().st_size for file in self.files)
            temporary = index.with_name(f"{_INDEX}.tmp")
            skip = self.preparation.skip_malformed
            with self.bar("finding records", total) as advance:
                summary = write_index(self.files, temporary, advance, skip=skip)
            atomic_files.replace_file(found, json.dumps(summary._asdict()))
            # A file of this name is complete.
            atomic_files.sync_path(temporary)
            temporary.replace(index)
            atomic_files.sync_path(self.scratch.path)
        return InputSummary(**typed_json.read_object(found).values)

    def pack(self, worker: EncodingWorker, folder: Path) -> list[FinishedSplit]:
        """Encodes the records, or takes finished shards, and packs them into files."""
        index = RecordIndex(self.scratch.path / _INDEX)
        order = record_order(self.preparation.splits, len(index))
        pad_id = open_tokenizer(self.preparation.tokenizer).pad_id
        total = sum(file.contents.stat().st_size for file in self.files)
        finished: list[FinishedSplit] = []
        writer: SplitWriter | None = None
        results = worker_pool.run_tasks(
            worker_pool.split_tasks(order, index),
            worker,
            self.preparation,
            self.files,
            self.workers,
            self.scratch.shards,
        )
        with self.bar("encoding", total) as advance:
            for task, encoded in results:
                if encoded.problems:
                    if not self.preparation.skip_malformed:
                        raise InputError(encoded.problems[0])
                    append_skipped(folder, encoded.problems)
                if writer is None or writer.split != task.split:
                    finished += [] if writer is None else [writer.finish()]
                    writer = SplitWriter(self.preparation, task.split, pad_id, folder)
                writer.add(encoded)
                advance(task.bytes)
        assert writer is not None  # there is a record to train on
        return [*finished, writer.finish()]
