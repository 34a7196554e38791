"""Reads records and encodes them as examples, in one process or many."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from prompt_tuning.core import numpy_files, token_weights, typed_json
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation import tokenizer_files
from prompt_tuning.data.preparation.example_encoder import ExampleEncoder
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_order import TEST
from prompt_tuning.data.preparation.records import NO_CATEGORY, Record, RecordReader
from prompt_tuning.data.rows import csv_rows, hdf5_rows, token_columns
from prompt_tuning.data.rows.record_spans import RecordSpan
from prompt_tuning.data.text import chat_templates, conversations, record_fields
from prompt_tuning.data.text.text_encoder import TypedTokens
from prompt_tuning.data.text.tokenizers import Tokenizer

CATEGORY_IDS = "category_ids"


class ParsedRecord(NamedTuple):
    """A record that was read but not yet rendered.

    `number` is its index in its task. In the test split, `json_line` is the record as a
    line of JSON; it is empty elsewhere.
    """

    number: int
    location: str
    record: Record
    json_line: bytes


Examples = Sequence[tuple[ParsedRecord, list[TypedTokens]]]
"""Records with their examples."""


@dataclasses.dataclass(frozen=True)
class EncodingTask:
    """Consecutive records of one split: 0 train, 1 development, 2 test.

    `records` has the file, first byte, number of bytes and line of a record.
    """

    split: int
    records: Int64[np.ndarray, "n 4"]

    @property
    def bytes(self) -> int:
        """Number of input bytes that the task reads."""
        return int(self.records[:, 2].sum())


@dataclasses.dataclass(frozen=True)
class EncodedRecords:
    """Result of a task.

    Attributes:
      tokens: columns of the concatenated tokens of all examples, `[C, n]`; see
        `columns`.
      lengths: number of tokens by example.
      records: number of records used.
      without_completion: number of records left out because they have no completion.
      repeated_tokens: number of tokens that more than one example of a conversation
        has.
      problems: problems of the records that cannot be used.
      json_lines: the used records of the test split as lines of JSON.
    """

    tokens: Int32[np.ndarray, "C n"]
    lengths: Int64[np.ndarray, "a"]
    records: int
    without_completion: int
    repeated_tokens: int
    problems: list[str]
    json_lines: bytes

    def save(self, file: Path) -> None:
        """Writes a shard, each column in the narrowest type that fits."""
        arrays = {f"column_{n}": _narrow(x) for n, x in enumerate(self.tokens)} | {
            "lengths": self.lengths,
            "counts": np.array(
                [self.records, self.without_completion, self.repeated_tokens]
            ),
            "problems": np.frombuffer(json.dumps(self.problems).encode(), np.uint8),
            "json_lines": np.frombuffer(self.json_lines, np.uint8),
        }
        temporary = file.with_suffix(".tmp")
        with temporary.open("wb") as opened:
            # The stubs of `savez` take no mapping of names to arrays.
            np.savez(opened, **arrays)  # pyright: ignore
        temporary.replace(file)

    @classmethod
    def load(cls, file: Path) -> "EncodedRecords":
        """Reads a shard; InputError if it is damaged, as a power cut may leave it."""
        arrays = numpy_files.read_npz(file)
        columns = [x for name, x in arrays.items() if name.startswith("column_")]
        records, without_completion, repeated = arrays["counts"].tolist()
        return cls(
            np.array(columns, np.int32),
            arrays["lengths"],
            records,
            without_completion,
            repeated,
            typed_json.parse_json(arrays["problems"].tobytes(), str(file)),
            arrays["json_lines"].tobytes(),
        )


def _narrow(column: Int32[np.ndarray, "n"]) -> np.ndarray:
    ends = (column.min(), column.max()) if len(column) else (0,)
    return column.astype(np.result_type(*map(np.min_scalar_type, ends)))


def columns(preparation: Preparation) -> dict[str, tuple[np.dtype, int | float]]:
    """Returns the types and padding values of the output's datasets, by name.

    The padding value of `input_ids` depends on the tokenizer; it is 0 here.
    """
    by_name: dict[str, tuple[np.dtype, int | float]] = {
        hdf5_rows.INPUT_IDS: (np.dtype("<i4"), 0),
        hdf5_rows.TOKEN_TYPE_IDS: (np.dtype("<i4"), token_weights.PADDING),
    }
    if preparation.record.categories:
        by_name[CATEGORY_IDS] = np.dtype("<i4"), NO_CATEGORY
    if preparation.record.weight_key is not None:
        by_name[token_columns.LOSS_WEIGHTS] = np.dtype("<f4"), 0.0
    return by_name


class EncodingWorker:
    """Runs tasks, which refer to `files` by index; each process has one worker."""

    def __init__(self, preparation: Preparation, files: Sequence[InputFile]):
        self._files = files
        self._skip = preparation.skip_malformed
        self._columns = columns(preparation)
        self._reader = RecordReader(preparation.record)
        for file in files:
            self._reader.check_columns(file)
        tokenizer = tokenizer_files.open_tokenizer(preparation.tokenizer)
        chat = _open_chat_template(preparation, tokenizer)
        self.uses_date = chat is not None and chat.uses_date
        self._encoder = ExampleEncoder(preparation.text, tokenizer, chat)

    def __call__(self, task: EncodingTask) -> EncodedRecords:
        """Reads and encodes the records of a task.

        Without `skip_malformed`, it stops at a record that cannot be used; the first in
        `problems` is then the first of the task.
        """
        problems: dict[int, str] = {}
        parsed = self._parse(task, problems)
        without_completion = 0
        examples: list[tuple[ParsedRecord, list[TypedTokens]]] = []
        encoded = self._encoder([(r.record, r.location) for r in parsed])
        for record, found in zip(parsed, encoded, strict=True):
            if isinstance(found, InputError):
                problems[record.number] = str(found)
            elif not found:
                without_completion += 1
            else:
                examples.append((record, found))
        return EncodedRecords(
            *self._build_columns(examples),
            records=len(examples),
            without_completion=without_completion,
            repeated_tokens=sum(x.repeated for _, each in examples for x in each),
            # In the order of the records, however they are divided into tasks.
            problems=[problems[number] for number in sorted(problems)],
            json_lines=b"".join(record.json_line for record, _ in examples),
        )

    def _parse(
        self, task: EncodingTask, problems: dict[int, str]
    ) -> list[ParsedRecord]:
        """Reads the records of a task; `problems` gets the malformed ones."""
        parsed: list[ParsedRecord] = []
        for number, (file, descriptor, span, location) in enumerate(self._open(task)):
            try:
                content = csv_rows.read_record(descriptor, span, location)
                record = self._reader.read(file, content, location)
            except InputError as problem:
                problems[number] = str(problem)
                if not self._skip:
                    break
                continue
            line = _json_line(file, content, record) if task.split == TEST else b""
            parsed.append(ParsedRecord(number, location, record, line))
        return parsed

    def _open(
        self, task: EncodingTask
    ) -> Iterator[tuple[InputFile, int, RecordSpan, str]]:
        """Yields file, open descriptor, span and location of all records."""
        rows = task.records.tolist()
        for number, group in itertools.groupby(rows, key=lambda row: row[0]):
            file = self._files[number]
            with file.contents.open("rb") as opened:
                for _, *fields in group:
                    span = RecordSpan(*fields)
                    yield file, opened.fileno(), span, file.location(span.line)

    def _build_columns(
        self, records: Examples
    ) -> tuple[Int32[np.ndarray, "C n"], Int64[np.ndarray, "a"]]:
        examples = [example for _, group in records for example in group]
        lengths = np.array([len(example.input_ids) for example in examples], np.int64)
        tokens = np.empty((len(self._columns), lengths.sum()), np.int32)
        tokens[0] = _concatenate([example.input_ids for example in examples])
        tokens[1] = _concatenate([example.token_types for example in examples])
        record_lengths = np.array(
            [sum(len(example.input_ids) for example in group) for _, group in records],
            np.int64,
        )
        for column, name in enumerate(self._columns):
            if name == CATEGORY_IDS:
                ids = np.array([r.record.category for r, _ in records], np.int32)
                tokens[column] = np.repeat(ids, record_lengths)
            elif name == token_columns.LOSS_WEIGHTS:
                weights = np.array([r.record.weight for r, _ in records], np.float32)
                # All columns are int32 until they are written: keep the bits.
                tokens[column] = np.repeat(weights.view(np.int32), record_lengths)
        return tokens, lengths


def _open_chat_template(
    preparation: Preparation, tokenizer: Tokenizer
) -> chat_templates.ChatTemplate | None:
    text = preparation.text
    if not text.chat:
        return None
    template = chat_templates.read_chat_template(
        tokenizer_files.tokenizer_folder(preparation.tokenizer),
        text.chat_template,
        tokenizer_files.special_texts(preparation.tokenizer, tokenizer),
        text.date,
    )
    return dataclasses.replace(template, variables=text.chat_template_kwargs or {})


def _concatenate(lists: Sequence[list[int]]) -> Int32[np.ndarray, "n"]:
    # Extending one list is faster than concatenating many small arrays.
    joined: list[int] = []
    for each in lists:
        joined += each
    return np.array(joined, np.int32)


def _json_line(file: InputFile, content: bytes, record: Record) -> bytes:
    """Returns a record as a line of JSON: unchanged, or built from a row or a text."""
    if file.table is None and not file.is_text:
        return content.rstrip(b"\r\n") + b"\n"
    if record.chat is not None:
        messages, _, tools, variables, _ = record.chat
        fields = {
            conversations.MESSAGES_KEY: messages,
            record_fields.TOOLS_KEY: tools,
            record_fields.VARIABLES_KEY: variables,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
    else:
        turn = record.turns[0]
        fields = {"prompt": turn.prompt, "completion": turn.completion}
    return json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n"
