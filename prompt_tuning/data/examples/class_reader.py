"""Reads rows and records as the examples of a model with a head that scores classes."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from prompt_tuning.core.batch import value_columns
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_choices import ClassProblem
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples import example_groups, row_readers
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.row_sources import Row, RowBlock

UNREAD = "a"
"""Text that stands in the place of a completion that is not encoded."""


@dataclasses.dataclass(frozen=True)
class ClassRowReader:
    """Reads the examples of another reader, with their classes as the only targets.

    The inputs of an example are its prompt. Target `i` belongs to the state of token
    `i`, and only the last target is learned: it is the number of the class. It weighs
    the mean nonzero loss weight of the completion, and in a column of the data it has
    the value of the completion's first token.

    In an encoder-decoder the targets are the inputs, so that the decoder reads these,
    too, but for the last, which is the class.
    """

    reader: row_readers.RowReader
    model: ModelInterface

    @property
    def same_tokens(self) -> bool:
        """See `RowReader`."""
        return self.reader.same_tokens

    def scan(self, block: RowBlock) -> row_readers.ExampleIndex:
        """Returns the other reader's index with the lengths of prompts and classes."""
        index = self.reader.scan(block)
        lengths, counts = np.zeros((2, len(index)), np.int64)
        for number in range(len(index)):
            row = int(index.rows[number])
            tokens = slice(index.starts[number], index.stops[number])
            try:
                example = self.example(block.read(row, tokens))
            except InputError as error:
                raise InputError(f"{block.describe(row)}: {error}") from error
            lengths[number] = len(example.inputs)
            counts[number] = np.count_nonzero(example.weights)
        return dataclasses.replace(
            index, input_lengths=lengths, target_lengths=lengths, weight_counts=counts
        )

    def kept(self, token_types: row_readers.TokenTypes) -> row_readers.TokenMask:
        """Returns which tokens are not padding; see `RowReader`."""
        return self.reader.kept(token_types)

    def example(self, row: Row) -> row_readers.Example:
        """Builds the other reader's example with its class; see `RowReader`."""
        example = self.reader.example(row)
        completion, reads_twice = example.prefix_length, not self.reader.same_tokens
        given = example.inputs if reads_twice else example.inputs[:completion]
        prompt = self.model.scored_row(given)
        if not prompt:
            raise InputError(
                "the prompt is empty, and no beginning-of-sequence token precedes it, "
                "so there is nothing to tell the class by"
            )
        number = 0  # not read where the columns have the values of all classes
        if self.model.problem == "single_label":
            number = self._class_of(example.targets[completion:])

        def at_end(value) -> np.ndarray:
            array = np.zeros(len(prompt), np.asarray(value).dtype)
            array[-1] = value
            return array

        inputs, targets = np.array(prompt, np.int32), at_end(np.int32(number))
        if reads_twice:
            targets[:-1] = inputs[:-1]
        return row_readers.Example(
            inputs,
            targets,
            at_end(np.float32(example_groups.example_weight(example))),
            0 if reads_twice else len(prompt),
            example.prompt_id,
            columns={n: at_end(x[completion]) for n, x in example.columns.items()},
        )

    def _class_of(self, completion: Int32[np.ndarray, "c"]) -> int:
        # The ids of a template's prompt vectors and special tokens are not decoded.
        text = self.model.require_tokenizer().decode(completion).strip()
        if text not in self._numbers:
            raise InputError(
                f"the completion is {shown(text)}, which is none of the labels "
                f"{shown(list(self.model.labels))} of the class head"
            )
        return self._numbers[text]

    @functools.cached_property
    def _numbers(self) -> Mapping[str, int]:
        """The number of a class by its label, as written and as it is decoded."""
        tokenizer, labels = self.model.require_tokenizer(), self.model.labels
        decoded = [tokenizer.decode(tokenizer.encode(x)).strip() for x in labels]
        numbers = {text: number for number, text in enumerate(decoded)}
        if len(numbers) < len(labels):
            raise InputError(
                f"the tokenizer reads the labels {shown(list(labels))} of the class "
                f"head as {shown(decoded)}, expected different texts: rename labels"
            )
        return numbers | {label.strip(): i for i, label in enumerate(labels)}


@dataclasses.dataclass(frozen=True)
class TaggedRowReader(ClassRowReader):
    """Reads rows of tagged words, where the completion has a number for each token.

    The number is 0 for a token without a tag to learn, and else the class plus one; see
    `word_rows`. The tokens that begin a row have no number.
    """

    def example(self, row: Row) -> row_readers.Example:
        """Builds an example of the words with their classes; see `RowReader`."""
        example = self.reader.example(row)
        stop = example.prefix_length
        tags = example.inputs[stop:]
        scored = self.model.scored_row(example.inputs[:stop])

        def of_tokens(array: np.ndarray) -> np.ndarray:
            placed = np.zeros(len(scored), array.dtype)
            placed[stop - len(tags) : stop] = array
            return placed

        weights = example.weights[stop:] * (tags > 0)
        if len(tags) > stop or not weights.any():
            raise InputError("no word with a tag has a token, so nothing is learned")
        return row_readers.Example(
            np.array(scored, np.int32),
            of_tokens(np.maximum(tags - 1, 0)),
            of_tokens(weights.astype(np.float32)),
            len(scored),
            columns={n: of_tokens(x[stop:]) for n, x in example.columns.items()},
        )


@dataclasses.dataclass(frozen=True)
class ClassValueEdit:
    """Turns the completion of a record, under `key`, into one value for each class.

    If labels do not exclude each other, a record lists the names or numbers of those
    that apply, as data sets on the Hugging Face Hub do, or has a float for each class.
    In a table, names are separated by commas. A regression has a number, or a list with
    one for each class. For example `{"prompt": "a", "labels": ["sad", "angry"]}`.
    """

    key: str
    labels: Sequence[str]
    problem: ClassProblem

    def __call__(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the record with the values."""
        if self.key not in record:
            raise InputError(
                f"found the keys {shown(sorted(record))}, expected {self.key!r}: name "
                f"the key by {how_to_set('DataSource.completion_key', 'KEY')}"
            )
        given = record[self.key]
        read = self._numbers if self.problem == "regression" else self._labels
        values = dict(zip(value_columns(len(self.labels)), read(given), strict=True))
        return {**record, self.key: UNREAD, **values}

    def _numbers(self, given: Any) -> list[float]:
        items = given if isinstance(given, list) else [given]
        numbers = [_number(item) for item in items]
        found = [number for number in numbers if number is not None]
        if len(found) != len(self.labels) or len(found) < len(items):
            count = len(self.labels)
            expected = "a number" if count == 1 else f"a list of {count} numbers"
            raise InputError(f"{self.key!r} is {shown(given)}, expected {expected}")
        return found

    def _labels(self, given: Any) -> list[float]:
        names = [label.strip() for label in self.labels]
        items = given
        if isinstance(given, str):
            whole = given.strip()
            items = [whole] if whole in names else whole.split(",") if whole else []
        if not isinstance(items, list):
            items = [items]
        shares = [x for x in items if isinstance(x, float) and 0 <= x <= 1]
        if len(shares) == len(items) == len(names):
            return shares
        chosen = [self._index(item, names) for item in items]
        if None in chosen:
            raise InputError(
                f"{self.key!r} is {shown(given)}, expected a list of some of the "
                f"labels {shown(names)}, or of their numbers from 0"
            )
        numbers = [item for item in items if isinstance(item, int)]
        if len(set(numbers)) < len(numbers):
            raise InputError(
                f"{self.key!r} is {shown(given)}, which has the number of a class more "
                "than once; if it is a value of each class, write floats, such as "
                f"{shown([float(number) for number in numbers])}"
            )
        return [float(number in chosen) for number in range(len(names))]

    @staticmethod
    def _index(item: Any, names: Sequence[str]) -> int | None:
        if isinstance(item, str) and item.strip() in names:
            return names.index(item.strip())
        if isinstance(item, bool) or not isinstance(item, int):
            return None
        return item if 0 <= item < len(names) else None


def _number(item: Any) -> float | None:
    """Returns a finite number, also from a text in a table; None for anything else."""
    if isinstance(item, bool) or not isinstance(item, int | float | str):
        return None
    try:
        number = float(item)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
