"""Rows for a changed text: new rows about what is new, plus old ones.

Rows of chunks that the new text still contains are kept. If the teacher reads the whole
text, all rows are kept except passages that are gone: the loss compares predictions
with the teacher's after the new text, so old completions need not be right.
"""

import bisect
import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.typed_json import as_object, parse_json, read_object
from prompt_tuning.data.examples.context_column import IDS, TEXT
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.texts.study_files import (
    CHUNK_KEY,
    CHUNKS_FILE,
    ROWS_FILE,
    STUDY_FILE,
    Advance,
    Line,
    StudyFiles,
    join_study,
    recorded_study,
    split_rows,
    write_ids,
    write_study,
)
from prompt_tuning.texts.text_study import PASSAGE, TextStudy, read_texts

OLD_SHARE = 0.5
"""Share of old rows among those to learn from."""
LEAST_ROWS = 32
LEAST_TOKENS = 24
"""Minimum number of tokens of a part that rows are written about."""
CHANGED, KEPT = "changed", "kept.hdf5"
"""Folder of the rows about what is new, and file of the old held-out rows."""
UNIT = re.compile(r".+?(?:[.!?][\"')\]]*\s+|\n+|\Z)", re.DOTALL)
"""A sentence or a line."""

PART = "part "
"""Prefix of the names of new parts, before their numbers."""

Span = tuple[int, int]
Numbers = Mapping[tuple[str, int], int]
"""New numbers of chunks, by "old" or "new" and the previous number."""


class StudyUpdate(NamedTuple):
    """The rows of an update.

    `kept` are the old held-out rows about what has not changed, if any; `new` and `old`
    count the rows to learn from.
    """

    files: StudyFiles
    kept: Path | None
    new: int
    old: int


@dataclasses.dataclass(frozen=True)
class OldStudy:
    """Rows about the previous version of a text.

    `text` is the old text if the teacher reads all of it; None if it reads chunks.
    `settings` records what the rows were made from.
    """

    text: str | None
    chunks: list[Line]
    train: list[Line]
    held_out: list[Line]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, text: str | None) -> "OldStudy":
        """Reads the rows of a memory.

        `text` is the text that its teacher reads, or None for chunks.

        Raises:
          InputError: if the folder has no rows.
        """
        for name in (STUDY_FILE, CHUNKS_FILE, ROWS_FILE):
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder / name} is missing, and an update needs the rows that "
                    "the memory was made with: give the directory of a memory with its "
                    "study folder"
                )
        recorded = read_object(folder / STUDY_FILE).values
        chunks, rows = (_read_lines(folder / name) for name in (CHUNKS_FILE, ROWS_FILE))
        train, held_out = split_rows(rows, recorded_study(recorded))
        return cls(text, chunks, train, held_out, dict(recorded))

    @property
    def digest(self) -> str:
        """Digest of the text."""
        return str(self.settings.get("text"))

    @property
    def chunk(self) -> int | None:
        """Maximum number of tokens of a chunk."""
        return self.settings.get("chunk")


def update_study(
    folder: Path,
    old: OldStudy,
    text: str,
    study: TextStudy,
    model: PromptedModel,
    parameters: Parameters,
    advance: Advance | None = None,
) -> StudyUpdate:
    """Writes rows about what is new in a text, and adds old ones.

    `study` has the settings for rows about the whole text; the numbers of new rows are
    reduced in proportion to what is new.

    Raises:
      InputError: if the text contains nothing new, or the folder has other rows.
    """
    _check_folder(folder)
    tokenizer = model.needed_tokenizer()
    places = {} if old.text is not None else kept_chunks(old.chunks, text)
    spans = new_parts(old, text, tokenizer)
    parts = {f"{PART}{n}": text[start:stop] for n, (start, stop) in enumerate(spans)}
    count, whole = (
        sum(len(tokenizer.encode(x)) for x in y) for y in (parts.values(), [text])
    )
    share = min(count / whole, 1.0)
    of_parts = dataclasses.replace(
        study,
        rows=max(round(study.rows * share), LEAST_ROWS),
        held_out=study.held_out and max(round(study.held_out * share), 1),
    )
    chunks = read_texts(parts, model, of_parts)
    write_study(folder / CHANGED, chunks, of_parts, model, parameters, advance)
    new = OldStudy.read(folder / CHANGED, None)
    starts = [start for start, _ in spans]
    lines, numbers = joined_chunks(old, new, text, starts, places, tokenizer)
    train, held_out = (
        [{**row, CHUNK_KEY: numbers["new", row[CHUNK_KEY]]} for row in rows]
        for rows in (new.train, new.held_out)
    )
    keeper = functools.partial(_kept_rows, old, text, model, numbers)
    old_train, old_held_out = keeper(old.train), keeper(old.held_out)
    wanted = round(len(train) * OLD_SHARE / (1 - OLD_SHARE))
    order = np.random.default_rng(study.seed).permutation(len(old_train))
    both = (
        [*train, *(old_train[index] for index in order[:wanted])],
        [*held_out, *old_held_out],
    )
    digest = hashlib.sha256(f"{old.digest} {new.digest}".encode()).hexdigest()
    files = join_study(folder, *both, lines, new.settings | {"text": digest})
    kept_file = folder / KEPT if old_held_out else None
    if kept_file is not None:
        write_ids(kept_file, old_held_out)
    return StudyUpdate(files, kept_file, len(train), len(order[:wanted]))


def joined_chunks(
    old: OldStudy,
    new: OldStudy,
    text: str,
    starts: Sequence[int],
    places: Mapping[int, int],
    tokenizer: Tokenizer,
) -> tuple[list[Line], Numbers]:
    """Returns the contexts that the teacher of all rows reads, and their numbers.

    `starts` has the start of each new part, and `places` the start of each old chunk in
    the text, by its number.

    Returns:
      the lines of the chunks, in text order, and their numbers; see `Numbers`. If the
      teacher reads the whole text, that is the only chunk.
    """
    if old.text is not None:
        line = _whole_text(text, tokenizer)
        studies = {"old": old, "new": new}
        names = [(kind, n) for kind, x in studies.items() for n in range(len(x.chunks))]
        return [line], dict.fromkeys(names, 0)
    found = [(start, old.chunks[n], ("old", n)) for n, start in places.items()]
    for n, line in enumerate(new.chunks):
        part = int(line["document"].removeprefix(PART))
        found.append((starts[part], line, ("new", n)))
    found.sort(key=lambda chunk: chunk[0])
    numbers = {name: number for number, (_, _, name) in enumerate(found)}
    return [line for _, line, _ in found], numbers


def _whole_text(text: str, tokenizer: Tokenizer) -> Line:
    return {"document": "the text", TEXT: text, IDS: tokenizer.encode(text)}


def join_studies(
    folder: Path, studies: Sequence[OldStudy], tokenizer: Tokenizer
) -> StudyFiles:
    """Writes rows about several texts as one study; each keeps its context."""
    lines: list[Line] = []
    train: list[Line] = []
    held_out: list[Line] = []
    for study in studies:
        first, whole = len(lines), study.text is not None
        lines += [_whole_text(study.text, tokenizer)] if study.text else study.chunks
        for rows, joined in ((study.train, train), (study.held_out, held_out)):
            for row in rows:
                number = first + (0 if whole else row[CHUNK_KEY])
                joined.append({**row, CHUNK_KEY: number})
    digests = " ".join(study.digest for study in studies)
    text = hashlib.sha256(digests.encode()).hexdigest()
    made_from = studies[0].settings | {"text": text}
    return join_study(folder, train, held_out, lines, made_from)


def _read_lines(file: Path) -> list[Line]:
    lines = file.read_text().splitlines()
    return [dict(as_object(parse_json(x, str(file)), str(file)).values) for x in lines]


def _check_folder(folder: Path) -> None:
    if (folder / STUDY_FILE).exists() and not (folder / CHANGED).exists():
        raise InputError(
            f"{folder} has the rows of another memory, which an update would replace: "
            "give another directory (--out)"
        )


def _kept_rows(
    old: OldStudy,
    text: str,
    model: PromptedModel,
    numbers: Numbers,
    rows: Sequence[Line],
) -> list[Line]:
    """Returns old rows whose chunk or passage the text still contains, renumbered."""
    known = _spaced(model.needed_tokenizer().encode(text))
    begin = len(model.interface.begin_ids)
    in_chunks = old.text is None
    return [
        {**row, CHUNK_KEY: numbers["old", row[CHUNK_KEY]]}
        for row in rows
        if ("old", row[CHUNK_KEY]) in numbers
        and (in_chunks or row["kind"] != PASSAGE or _occurs(row, begin, known))
    ]


def kept_chunks(chunks: Sequence[Line], text: str) -> dict[int, int]:
    """Returns the starts of the old chunks that a text still contains, by number."""
    places: dict[int, int] = {}
    for number, chunk in enumerate(chunks):
        old = chunk.get(TEXT, "")
        spans = [(at, at + len(chunks[n][TEXT])) for n, at in places.items()]
        at = text.find(old) if old else -1
        while at >= 0 and any(a < at + len(old) and at < b for a, b in spans):
            at = text.find(old, at + 1)
        if at >= 0:
            places[number] = at
    return places


def new_parts(
    old: OldStudy, text: str, tokenizer: Tokenizer, *, least: int = LEAST_TOKENS
) -> list[Span]:
    """Finds the new parts of a text: between kept chunks, or sentences that are new.

    A part with fewer than `least` tokens is extended to both sides.

    Raises:
      InputError: if nothing is new.
    """
    units = [unit.span() for unit in UNIT.finditer(text)]
    if old.text is not None:
        known = {"", *(unit.strip() for unit in UNIT.findall(old.text))}
        spans = [(a, b) for a, b in units if text[a:b].strip() not in known]
    else:
        places = kept_chunks(old.chunks, text)
        taken = sorted((at, at + len(old.chunks[n][TEXT])) for n, at in places.items())
        ends, starts = [0, *(b for _, b in taken)], [a for a, _ in taken]
        spans = list(zip(ends, [*starts, len(text)], strict=True))
        spans = [(a, b) for a, b in spans if text[a:b].strip()]
    if not spans:
        raise InputError(
            "the text has nothing new, so there is nothing to learn: give the changed "
            "text, or leave out what to start from to remember it anew"
        )
    bounds, parts = [0, *(stop for _, stop in units)], []
    for start, stop in spans:
        first = bisect.bisect_right(bounds, start) - 1
        last = bisect.bisect_left(bounds, stop)
        while len(tokenizer.encode(text[bounds[first] : bounds[last]])) < least:
            if first == 0 and last == len(bounds) - 1:
                break
            first, last = max(first - 1, 0), min(last + 1, len(bounds) - 1)
        start, stop = bounds[first], bounds[last]
        if parts and start <= parts[-1][1]:
            joined = parts.pop()
            start, stop = joined[0], max(joined[1], stop)
        parts.append((start, stop))
    return parts


def _spaced(ids: Sequence[int]) -> str:
    return f" {' '.join(map(str, ids))} "


def _occurs(row: Line, begin: int, known: str) -> bool:
    """Whether a text contains the tokens of a passage."""
    return _spaced([*row["given_ids"][begin:], *row["learned_ids"]]) in known
