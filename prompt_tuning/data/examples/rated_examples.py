"""Examples of answers with a rating: good or bad."""

import dataclasses

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.examples.example_groups import (
    ExampleGroups,
    check_prompt,
    example_weight,
    unweighted,
)
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.line_formats import first_record
from prompt_tuning.data.source_reading import files_of, reads_text
from prompt_tuning.settings.data_source import DataSource

LABEL = "label"
"""Key of the rating of an answer, as published data name it."""


class RatedExamples(ExampleGroups):
    """`E` examples of two rows each: a prompt with its answer, and with another one.

    The other answer is the one of the example before, so both rows have all answers. It
    is cut to the room that the model has.

    Args:
      examples: the answers, with the column `LABEL`: 1 for a good one, 0 for a bad one.
      maximum_length: maximum number of tokens of a row; None for no limit.
    """

    def __init__(self, examples: Examples, maximum_length: int | None):
        if len(examples) < 2:
            raise InputError(
                f"{examples.describe(0)} is the only example, but the objective reads "
                "each prompt with another example's answer, too: give at least two"
            )
        self._examples, self._maximum_length = examples, maximum_length
        self.unlearned, self.skipped = examples.unlearned, examples.skipped
        self.truncated = examples.truncated
        self.without_completion = examples.without_completion
        self.repetition = examples.repetition
        self.has_prompt_ids = examples.has_prompt_ids
        own = [examples[number] for number in range(len(examples))]
        self.gold = np.array(
            [_rating(examples, n, example) for n, example in enumerate(own)], np.int32
        )
        self.weights = np.array([example_weight(x) for x in own], np.float32)
        rows = [[len(x.inputs) for x in self[n]] for n in range(len(self))]
        self.rows_per_example = 2
        self.input_lengths = self.target_lengths = np.array(rows, np.int64).max(1)
        if not examples.reader.same_tokens:
            self.target_lengths = _longer(examples.target_lengths)
        self.weight_counts = _longer(examples.weight_counts)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the row of the answer, and of the answer of the example before."""
        own = self._examples[number]
        other = self._examples[(number - 1) % len(self)]
        return [unweighted(own), self._with_answer(unweighted(own), unweighted(other))]

    def _with_answer(self, own: Example, other: Example) -> Example:
        if not self._examples.reader.same_tokens:
            return dataclasses.replace(
                own, targets=other.targets, weights=other.weights
            )

        def join(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            kept, added = before[: own.prefix_length], after[other.prefix_length :]
            return np.concatenate([kept, added])[: self._maximum_length]

        return dataclasses.replace(
            own,
            inputs=join(own.inputs, other.inputs),
            targets=join(own.targets, other.targets),
            weights=join(own.weights, other.weights),
        )


def _longer(own: Int64[np.ndarray, "E"]) -> Int64[np.ndarray, "E"]:
    return np.maximum(own, np.roll(own, 1))


def has_ratings(source: DataSource) -> bool:
    """Tests whether the records of a data source rate their answers."""
    key = (source.columns or {}).get(LABEL, LABEL)
    return reads_text(source) and key in first_record(files_of(source)[0])


def load_ratings(source: DataSource, model: ModelInterface) -> RatedExamples:
    """Opens the files of a data source as rated answers."""
    columns = {LABEL: LABEL, **(source.columns or {})}
    if reads_text(source) and not has_ratings(source):
        keys = sorted(first_record(files_of(source)[0]))
        raise InputError(
            f"{files_of(source)[0]} contains records with the keys {shown(keys)}, "
            f"but the objective rates answers: give each record {columns[LABEL]!r}, "
            "true for a good answer and false for a bad one"
        )
    rated = dataclasses.replace(source, columns=columns)
    return RatedExamples(load_examples(rated, model), model.maximum_length)


def _rating(examples: Examples, number: int, example: Example) -> int:
    """Returns 1 for a good answer, and 0 for a bad one."""
    rating = float(example.columns[LABEL][np.flatnonzero(example.weights)[0]])
    if rating not in (0, 1):
        raise InputError(
            f"{examples.describe(number)}: the rating {LABEL!r} is {rating:g}, "
            "expected true (1) for a good answer, or false (0) for a bad one"
        )
    check_prompt(examples, number, example, "give each record a prompt")
    return int(rating)
