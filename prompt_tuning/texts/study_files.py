"""Files of a study: chunks, rows as text, and rows as token ids.

`chunks.jsonl` and `rows.jsonl` are readable. `train.hdf5` and `held_out.hdf5` have the
ids of the same rows and the number of each row's chunk, which `ContextDistillation`
reads with `context_key="chunk"`.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import jax
import numpy as np

from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.resumable_lines import resumable_lines
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.core.version import __version__
from prompt_tuning.data.examples.context_column import IDS, TEXT
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.texts.study_rows import StudyRow, StudyWriter
from prompt_tuning.texts.text_study import StudiedTexts, TextStudy

STUDY_FILE, CHUNKS_FILE, ROWS_FILE = "study.json", "chunks.jsonl", "rows.jsonl"
CHUNK_KEY = "chunk"

Advance = Callable[[int, str], None]
"""Called with a number of newly finished rows and a note on the speed."""

Line = dict[str, Any]
"""A row of `rows.jsonl`, as text and as ids."""
Decode = Callable[[Sequence[int]], str]


class StudyFiles(NamedTuple):
    """Files of a study, and the settings of the loss that reads them."""

    train: Path
    held_out: Path | None
    chunks: Path

    @classmethod
    def of(cls, folder: Path, study: TextStudy) -> "StudyFiles":
        """Returns the files of a study in a folder."""
        held_out = folder / "held_out.hdf5" if study.held_out else None
        return cls(folder / "train.hdf5", held_out, folder / CHUNKS_FILE)

    def exist(self) -> bool:
        """Whether all files exist, including the rows as text."""
        files = (*self, self.train.parent / ROWS_FILE)
        return all(file.exists() for file in files if file is not None)


def write_study(
    folder: Path,
    texts: StudiedTexts,
    study: TextStudy,
    model: PromptedModel,
    parameters: Parameters,
    advance: Advance | None = None,
) -> StudyFiles:
    """Writes rows about texts, resuming where an earlier call stopped.

    Raises:
      InputError: if the folder has rows made from something else.
    """
    files = StudyFiles.of(folder, study)
    ids = [(chunk.name, chunk.ids) for chunk in texts.chunks]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    settings = dataclasses.asdict(study) | {"kinds": list(texts.kinds)}
    made_from = {"model": model.interface.origin, "text": digest, **settings}
    record_settings(folder, made_from)
    if files.exist():
        return files
    writer = StudyWriter(texts, study, model, parameters)
    decode = model.needed_tokenizer().decode
    chunks = (
        {"document": chunk.name, TEXT: decode(chunk.ids), IDS: list(context)}
        for chunk, context in zip(texts.chunks, writer.contexts, strict=True)
    )
    replace_file(files.chunks, _json_lines(chunks))
    if not (folder / ROWS_FILE).exists():
        _write_lines(folder / ROWS_FILE, made_from, decode, writer, advance)
    lines = [json.loads(x) for x in (folder / ROWS_FILE).read_text().splitlines()]
    return _write_parts(files, *split_rows(lines, study))


def record_settings(folder: Path, made_from: dict[str, Any]) -> None:
    """Records what rows will be made from, before any are written.

    Raises:
      InputError: if the folder has rows made from something else.
    """
    if (folder / STUDY_FILE).exists():
        _check_same(folder / STUDY_FILE, made_from)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / STUDY_FILE, json.dumps(made_from, indent=1) + "\n")


def recorded_study(made_from: Mapping[str, Any]) -> TextStudy:
    """Reads the settings of rows from their record."""
    names = {field.name for field in dataclasses.fields(TextStudy)}
    return TextStudy(**{name: x for name, x in made_from.items() if name in names})


def split_rows(
    lines: Sequence[Line], study: TextStudy
) -> tuple[list[Line], list[Line]]:
    """Splits rows into those to learn from and held-out ones."""
    train, held_out = np.split(_order(len(lines), study), [study.rows])
    return [lines[index] for index in train], [lines[index] for index in held_out]


def join_study(
    folder: Path,
    train: Sequence[Line],
    held_out: Sequence[Line],
    chunks: Sequence[Line],
    made_from: Mapping[str, Any],
) -> StudyFiles:
    """Writes rows of several studies as one; `split_rows` splits them again.

    `made_from` is the record of what they are made from; the numbers of rows are
    replaced.

    Raises:
      InputError: if the folder has rows made from something else.
    """
    counts = {"rows": len(train), "held_out": len(held_out)}
    made_from = {**made_from, **counts}
    record_settings(folder, made_from)
    study, whole = recorded_study(made_from), [*train, *held_out]
    files = StudyFiles.of(folder, study)
    replace_file(files.chunks, _json_lines(chunks))
    rows = [whole[index] for index in np.argsort(_order(len(whole), study))]
    replace_file(folder / ROWS_FILE, _json_lines(rows))
    return _write_parts(files, train, held_out)


def _order(count: int, study: TextStudy) -> np.ndarray:
    """Returns the indices of the rows to learn from, then of the held-out rows."""
    return np.random.default_rng(study.seed).permutation(count)


def _json_lines(lines: Iterable[Line]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _write_parts(
    files: StudyFiles, train: Sequence[Line], held_out: Sequence[Line]
) -> StudyFiles:
    for file, part in zip(files[:2], (train, held_out), strict=True):
        if file is not None:
            write_ids(file, part)
    return files


def _check_same(file: Path, made_from: dict[str, Any]) -> None:
    """Checks that existing rows were made from the same text, model and settings."""
    recorded = read_object(file).values
    for name, value in made_from.items():
        if recorded.get(name) != value:
            found = f"is {shown(value)} and was {shown(recorded.get(name))}"
            raise InputError(
                f"{file.parent} has rows about a text, of which {name} {found}: give "
                "another directory (--out), or the same as before"
            )


def _write_lines(
    file: Path,
    made_from: dict[str, Any],
    decode: Decode,
    writer: StudyWriter,
    advance: Advance | None,
) -> None:
    """Writes the lines of all rows that the file does not have yet."""
    versions = {"prompt_tuning": __version__, "jax": jax.__version__}
    settings = made_from | versions
    advance = advance or (lambda count, note: None)
    with resumable_lines(file, settings, lambda line: True) as lines:
        advance(lines.done, "")
        started, tokens = time.monotonic(), 0
        for row in writer.rows(lines.done):
            lines.write(json.dumps(_line(row, decode), ensure_ascii=True))
            tokens += row.written
            speed = tokens / max(time.monotonic() - started, 1e-9)
            advance(1, f"{speed:,.0f} tokens/s")


def _line(row: StudyRow, decode: Decode) -> Line:
    """Returns a row as text, in the form that `train` reads, and as ids."""
    if row.messages:
        text: dict[str, Any] = {"messages": list(row.messages)}
    else:
        text = {"prompt": decode(row.given), "completion": decode(row.learned)}
    return {
        CHUNK_KEY: row.chunk,
        "kind": row.kind,
        **text,
        "given_ids": row.given,
        "learned_ids": row.learned,
    }


def write_ids(path: Path, rows: Sequence[Line]) -> None:
    """Writes ids, types and chunk numbers to an HDF5 file in the form of `prepare`."""
    width = max(len(row["given_ids"]) + len(row["learned_ids"]) for row in rows)
    ids = np.zeros((len(rows), width), np.int32)
    types = np.full_like(ids, PADDING)
    for index, row in enumerate(rows):
        whole, given_count = (
            [*row["given_ids"], *row["learned_ids"]],
            len(row["given_ids"]),
        )
        ids[index, : len(whole)] = whole
        types[index, :given_count] = PROMPT
        types[index, given_count : len(whole)] = COMPLETION
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
        file[CHUNK_KEY] = np.array([row[CHUNK_KEY] for row in rows], np.int32)
    partial.replace(path)
