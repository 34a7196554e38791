"""A preparation from its inputs to its output; it can be stopped at any moment."""

import dataclasses
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.encoding_worker import TaskWorker
from prompt_tuning.data.preparation.input_files import (
    InputFile,
    Origin,
    input_files,
    origins,
)
from prompt_tuning.data.preparation.output_files import (
    SKIPPED,
    Contents,
    is_ours,
    skipped_line,
    write_output,
)
from prompt_tuning.data.preparation.packing_progress import load_progress, save_progress
from prompt_tuning.data.preparation.preparation_reporter import (
    PreparationReporter,
    Silent,
)
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_index import Found, RecordIndex, write_index
from prompt_tuning.data.preparation.record_order import record_order
from prompt_tuning.data.preparation.scratch_directory import (
    INDEX,
    Scratch,
    open_scratch,
    scratch_folder,
    write_text,
)
from prompt_tuning.data.preparation.sequence_logs import AppendLog
from prompt_tuning.data.preparation.tokenizer_files import (
    open_tokenizer,
    tokenizer_files,
)
from prompt_tuning.data.preparation.worker_pool import (
    available_cores,
    do_tasks,
    tasks,
)

FORMAT = 2
"""Of the scratch folder; one of another format is begun again."""

CHECKPOINT_SECONDS = 10.0
MOST_WORKERS = 16
_FOUND = "found.json"


def default_workers() -> int:
    """As many as there are cores for this process, up to `MOST_WORKERS`."""
    return min(available_cores(), MOST_WORKERS)


def prepare(
    preparation: Preparation,
    *,
    workers: int | None = None,
    force: bool = False,
    reporter: PreparationReporter | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Path:
    """Makes the output folder, or goes on where an interrupted process stopped.

    The output's bytes depend on the preparation and its inputs alone: not on the
    workers, nor on interruptions. As the workers are processes that import the main
    module anew, a script calls this below `if __name__ == "__main__":`.

    Args:
      preparation: what is asked for.
      workers: processes that read and encode; None for one to a core.
      force: whether an output that such a preparation wrote is replaced.
      reporter: is told how far it is.
      checkpoint_seconds: how much work is lost at most when it is interrupted.

    Returns:
      The output folder.

    Raises:
      InputError: if something cannot be used; no output has been written then.
    """
    preparation.check()
    workers = default_workers() if workers is None else workers
    if workers < 1:
        raise InputError(f"workers is {workers}, expected at least 1")
    files = input_files(
        preparation.inputs, preparation.record, skip=preparation.skip_malformed
    )
    output = Path(preparation.output)
    _check_output_apart(preparation, files, output)
    worker = TaskWorker(preparation, files)
    with open_scratch(output) as scratch:
        if worker.asks_the_date and preparation.text.chat_date is None:
            preparation = _dated(preparation, scratch.identity())
            worker = TaskWorker(preparation, files)
        identity = _identity(preparation, origins(files))
        if scratch.identity() == identity and scratch.was_published:
            scratch.remove()
            return output
        _check_output(output, force)
        _check_scratch(scratch, identity, force)
        work = _Work(preparation, files, scratch, reporter or Silent(), workers)
        try:
            work.do(identity, worker, checkpoint_seconds)
            _check_output(output, force)
        except InputError:
            scratch.remove()
            raise
        scratch.publish()
        scratch.remove()
    return output


def _identity(preparation: Preparation, found: Sequence[Origin]) -> dict[str, Any]:
    """What the output's bytes depend on, as JSON holds it."""
    template = preparation.text.chat_template
    return {
        "format": FORMAT,
        "preparation": _as_json(dataclasses.asdict(preparation)),
        "inputs": [dataclasses.asdict(origin) for origin in found],
        "tokenizer": _stats(tokenizer_files(preparation.tokenizer)),
        "chat_template": [] if template is None else _stats([Path(template)]),
    }


def _dated(preparation: Preparation, known: Any) -> Preparation:
    """With today's date for its template; to go on, that of the day it was begun."""

    def on(date: str) -> Preparation:
        text = dataclasses.replace(preparation.text, chat_date=date)
        return dataclasses.replace(preparation, text=text)

    begun = known and known["preparation"]["text"].get("chat_date")
    if begun and _as_json(dataclasses.asdict(on(begun))) == known["preparation"]:
        return on(begun)
    return on(datetime.date.today().isoformat())


def _stats(paths: Sequence[Path]) -> list[list[Any]]:
    found = [(str(path), path.stat()) for path in paths]
    return [[path, stat.st_size, stat.st_mtime_ns] for path, stat in found]


def _as_json(value: Any) -> Any:
    """Tuples as lists, as they come back from a file."""
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, tuple) else value


def _check_output(output: Path, force: bool) -> None:
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    known = [name for name in names if is_ours(name)]
    atomic_files.check_writable(output, known=known, force=force)


def _check_scratch(scratch: Scratch, identity: dict[str, Any], force: bool) -> None:
    known = scratch.identity()
    if known is not None and known != identity and not force:
        raise InputError(
            f"{scratch.folder} holds a preparation that was interrupted, of other "
            "settings or of inputs that have changed since: repeat its command to go "
            "on with it, or say --force to begin anew"
        )


def _check_output_apart(
    preparation: Preparation, files: Sequence[InputFile], output: Path
) -> None:
    for name in preparation.inputs:
        folder = Path(name).resolve()
        if folder.is_dir() and output.resolve().is_relative_to(folder):
            raise InputError(
                f"output {output} lies in the input folder {name}, so that it would be "
                "read the next time: name a folder elsewhere"
            )
    if output.name in ("", ".."):
        raise InputError(f"output {output} has no name of its own: name a new folder")
    template = preparation.text.chat_template
    read = {file.path: "input" for file in files}
    read[Path(preparation.tokenizer.path)] = "tokenizer"
    if template is not None:
        read[Path(template)] = "chat template"
    for folder in (output.resolve(), scratch_folder(output).resolve()):
        for path, what in read.items():
            if path.resolve().is_relative_to(folder):
                raise InputError(
                    f"{what} {path} lies in {folder}, which is replaced when the "
                    "output is written, so that it would be lost: name another output"
                )


@dataclasses.dataclass
class _Work:
    """A preparation and where it is done."""

    preparation: Preparation
    files: Sequence[InputFile]
    scratch: Scratch
    reporter: PreparationReporter
    workers: int

    def do(
        self, identity: dict[str, Any], worker: TaskWorker, checkpoint_seconds: float
    ) -> None:
        """Everything but the output's last step, its name."""
        self.begin(identity)
        self.pack(worker, checkpoint_seconds)
        if [dataclasses.asdict(now) for now in origins(self.files)] != (
            identity["inputs"]
        ):
            raise InputError("an input was changed while it was read: start again")
        self.write()

    def begin(self, identity: dict[str, Any]) -> None:
        """Finds the records, unless an interrupted process has."""
        if self.scratch.identity() == identity:
            self.reporter.say("goes on where it was interrupted")
        else:
            self.scratch.begin(identity)
        index = self.scratch.folder / INDEX
        if index.exists():
            return
        sizes = sum(file.path.stat().st_size for file in self.files)
        self.reporter.begin("finding records", sizes)
        temporary = index.with_name(f"{INDEX}.tmp")
        skip = self.preparation.skip_malformed
        found = write_index(self.files, temporary, self.reporter.advance, skip=skip)
        write_text(self.scratch.folder / _FOUND, json.dumps(found._asdict()))
        temporary.replace(index)

    def pack(self, worker: TaskWorker, checkpoint_seconds: float) -> None:
        """Encodes the records and packs them, from the last checkpoint on."""
        index = RecordIndex(self.scratch.folder / INDEX)
        order = record_order(self.preparation.splits, len(index))
        pad_id = open_tokenizer(self.preparation.tokenizer).pad_id
        progress = load_progress(self.scratch, self.preparation, pad_id)
        skipped = AppendLog(self.scratch.folder / SKIPPED, progress.skipped)
        work = tasks(order, index, progress.split, progress.position)
        self.reporter.begin(
            "encoding", sum(file.path.stat().st_size for file in self.files)
        )
        self.reporter.advance(progress.bytes_read)
        saved = time.monotonic()
        for task, done in do_tasks(
            work, worker, self.preparation, self.files, self.workers
        ):
            if done.problems and not self.preparation.skip_malformed:
                raise InputError(done.problems[0])
            skipped.append(b"".join(map(skipped_line, done.problems)))
            progress.take(task, done)
            self.reporter.advance(task.bytes)
            if time.monotonic() - saved >= checkpoint_seconds:
                progress.skipped = skipped.sync()
                save_progress(self.scratch, progress)
                saved = time.monotonic()
        progress.leave()
        progress.skipped = skipped.sync()
        save_progress(self.scratch, progress)

    def write(self) -> None:
        """Writes the output's files from what was packed."""
        progress = load_progress(self.scratch, self.preparation, 0)
        found = Found(**json.loads((self.scratch.folder / _FOUND).read_text()))
        contents = Contents(self.preparation, self.files, found, progress.finished)
        self.reporter.begin("writing", contents.steps)
        write_output(
            contents, self.scratch.folder, self.scratch.empty_new(), self.reporter
        )
