"""The work that is done in parallel: records read and made into typed tokens."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import PADDING
from prompt_tuning.data.preparation.chat_templates import read_chat_template
from prompt_tuning.data.preparation.example_encoder import (
    Article,
    ArticleMaker,
    Passage,
)
from prompt_tuning.data.preparation.input_files import InputFile, record_bytes
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_order import TEST
from prompt_tuning.data.preparation.record_spans import RecordSpan
from prompt_tuning.data.preparation.records import NO_CATEGORY, Record, RecordReader
from prompt_tuning.data.preparation.tokenizer_files import (
    open_tokenizer,
    special_texts,
    tokenizer_folder,
)
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS, TOKEN_TYPE_IDS
from prompt_tuning.data.rows.token_columns import LOSS_WEIGHTS
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer

CATEGORY_IDS = "category_ids"


class Unit(NamedTuple):
    """A record that was read and is yet to be encoded.

    Attributes:
      number: its place in the task.
      place: where it stands, for messages.
      record: what it says.
      passages: its texts.
      line: it as a line of JSON, if it is of the test split.
    """

    number: int
    place: str
    record: Record
    passages: list[Passage]
    line: bytes


Encoded = Sequence[tuple[Unit, list[Article]]]


@dataclasses.dataclass(frozen=True)
class Task:
    """Some records of one split, one after the other.

    Attributes:
      split: 0 train, 1 development, 2 test.
      records: file, first byte, number of bytes and line of each.
      position: one past the last of them in the order of the split.
    """

    split: int
    records: Int64[np.ndarray, "n 4"]
    position: int

    @property
    def bytes(self) -> int:
        """How much of the input it reads."""
        return int(self.records[:, 2].sum())


@dataclasses.dataclass(frozen=True)
class Done:
    """What became of a task.

    Attributes:
      tokens: columns of the tokens of all articles, `[C, n]`; see `columns`.
      lengths: tokens of each article.
      records: how many were used.
      without_completion: how many had nothing to learn and were left out.
      problems: what is wrong with each record that cannot be used.
      texts: the used records of the test split as JSON lines.
    """

    tokens: Int32[np.ndarray, "C n"]
    lengths: Int64[np.ndarray, "a"]
    records: int
    without_completion: int
    problems: list[str]
    texts: bytes


def columns(preparation: Preparation) -> dict[str, tuple[np.dtype, int | float]]:
    """The data sets of a preparation: type of each, and what padding holds."""
    found: dict[str, tuple[np.dtype, int | float]] = {
        INPUT_IDS: (np.dtype("<i4"), 0),
        TOKEN_TYPE_IDS: (np.dtype("<i4"), PADDING),
    }
    if preparation.record.categories:
        found[CATEGORY_IDS] = np.dtype("<i4"), NO_CATEGORY
    if preparation.record.weight_key is not None:
        found[LOSS_WEIGHTS] = np.dtype("<f4"), 0.0
    return found


class TaskWorker:
    """Does tasks; each process has its own.

    Args:
      preparation: what is asked for.
      files: the inputs that the tasks name by number.

    Raises:
      InputError: if the tokenizer, a template or a table's columns cannot be used.
    """

    def __init__(self, preparation: Preparation, files: Sequence[InputFile]):
        self._files = files
        self._skip = preparation.skip_malformed
        self._columns = columns(preparation)
        self._reader = RecordReader(preparation.record)
        for file in files:
            self._reader.check_columns(file)
        tokenizer = open_tokenizer(preparation.tokenizer)
        text = preparation.text
        chat = None
        if text.chat:
            if not isinstance(tokenizer, HuggingFaceTokenizer):
                raise InputError(
                    f"--chat with the tokenizer {preparation.tokenizer.path}, a "
                    "sentencepiece file, in whose texts special tokens cannot be "
                    "written: use a folder with tokenizer.json"
                )
            chat = read_chat_template(
                tokenizer_folder(preparation.tokenizer),
                text.chat_template,
                special_texts(preparation.tokenizer, tokenizer),
                text.date,
            )
        self.asks_the_date = chat is not None and chat.asks_the_date
        self._maker = ArticleMaker(text, tokenizer, chat)

    def __call__(self, task: Task) -> Done:
        """Reads and encodes the records of a task.

        Without `skip_malformed` the first record that cannot be used ends it; it is
        the only one in `problems`.
        """
        problems: dict[int, str] = {}
        units: list[Unit] = []
        without = 0
        for number, (file, opened, span, place) in enumerate(self._places(task)):
            try:
                content = record_bytes(opened, span, place)
                record = self._reader.read(file, content, place)
                passages = self._maker.passages(record, place)
            except InputError as problem:
                problems[number] = str(problem)
                if not self._skip:
                    break
                continue
            if not passages:
                without += 1
                continue
            line = _json_line(file, content, record) if task.split == TEST else b""
            units.append(Unit(number, place, record, passages, line))
        encoded = self._encoded(units, problems)
        return Done(
            *self._table(encoded),
            records=len(encoded),
            without_completion=without,
            # In their order, whichever way the records are cut into tasks.
            problems=[problems[number] for number in sorted(problems)],
            texts=b"".join(unit.line for unit, _ in encoded),
        )

    def _places(self, task: Task) -> Iterator[tuple[InputFile, int, RecordSpan, str]]:
        """The file of each record, its descriptor while it is open, and the place."""
        rows = task.records.tolist()
        for number, group in itertools.groupby(rows, key=lambda row: row[0]):
            file = self._files[number]
            with file.path.open("rb") as opened:
                for _, *where in group:
                    span = RecordSpan(*where)
                    place = f"{file.path}, line {span.line}"
                    yield file, opened.fileno(), span, place

    def _encoded(self, units: Sequence[Unit], problems: dict[int, str]) -> Encoded:
        """The articles of records, those left out that cannot be encoded."""
        try:
            made = self._maker.articles([unit.passages for unit in units])
        except InputError:
            pass
        else:
            return list(zip(units, made, strict=True))
        found: list[tuple[Unit, list[Article]]] = []
        for unit in units:
            try:
                found.append((unit, self._maker.articles([unit.passages])[0]))
            except InputError as problem:
                problems[unit.number] = f"{unit.place}: {problem}"
        return found

    def _table(
        self, encoded: Encoded
    ) -> tuple[Int32[np.ndarray, "C n"], Int64[np.ndarray, "a"]]:
        """The columns of all articles, and their lengths."""
        articles = [article for _, made in encoded for article in made]
        lengths = np.array([len(article.input_ids) for article in articles], np.int64)
        tokens = np.empty((len(self._columns), lengths.sum()), np.int32)
        tokens[0] = _flat([article.input_ids for article in articles])
        tokens[1] = _flat([article.token_types for article in articles])
        of_record = np.array(
            [sum(len(article.input_ids) for article in made) for _, made in encoded],
            np.int64,
        )
        for column, name in enumerate(self._columns):
            if name == CATEGORY_IDS:
                each = np.array([unit.record.category for unit, _ in encoded], np.int32)
                tokens[column] = np.repeat(each, of_record)
            elif name == LOSS_WEIGHTS:
                weights = np.array(
                    [unit.record.weight for unit, _ in encoded], np.float32
                )
                tokens[column] = np.repeat(weights.view(np.int32), of_record)
        return tokens, lengths


def _flat(lists: Sequence[list[int]]) -> Int32[np.ndarray, "n"]:
    joined: list[int] = []
    for each in lists:
        joined += each
    return np.array(joined, np.int32)


def _json_line(file: InputFile, content: bytes, record: Record) -> bytes:
    """A record as a line of JSON: as it was, or made from a row or a line of text."""
    if file.delimiter is None and not file.is_text:
        return content.rstrip(b"\r\n") + b"\n"
    turn = record.turns[0]
    made = {"prompt": turn.prompt, "completion": turn.completion}
    return json.dumps(made, ensure_ascii=False).encode("utf-8") + b"\n"
