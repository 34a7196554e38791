"""Examples of two answers to one prompt, of which one is preferred."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_groups import (
    ExampleGroups,
    after_prompt,
    check_prompt,
    example_weight,
    given_tokens,
    unweighted,
)
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.rows.line_formats import first_record
from prompt_tuning.data.source_reading import files_of, reads_text
from prompt_tuning.data.text.preferences import ANSWERS, with_prompt
from prompt_tuning.settings.data_source import DataSource


class PreferenceExamples(ExampleGroups):
    """`E` examples of two rows each: a prompt with a chosen and a rejected answer.

    A prompt that both answers follow is read once, if `share` allows it.

    Records with two equal answers teach nothing and are left out, as are those of which
    an answer is empty, or too long where such rows are skipped.

    Args:
      chosen: examples of the chosen answers.
      rejected: examples of the rejected ones, of the same records.
      share: whether the model can read a prompt once for both.

    Raises:
      InputError: if no record has two different answers, or nothing precedes one.
    """

    def __init__(self, chosen: Examples, rejected: Examples, *, share: bool = False):
        records = [_records(side) for side in (chosen, rejected)]
        common, *places = np.intersect1d(
            *records, assume_unique=True, return_indices=True
        )
        # Examples in the order of the files, which `intersect1d` keeps.
        self._sides = (chosen, rejected)
        self._numbers = np.stack(places, axis=1)  # [E, 2]
        equal = self._equal()
        self._numbers = self._numbers[~equal]
        if not len(self._numbers):
            raise InputError(
                f"{chosen.describe(0)}, and all other records: the two answers are "
                "equal, so nothing can be learned from them: give records with a "
                f"better answer, {ANSWERS[0]!r}, and a worse one, {ANSWERS[1]!r}"
            )
        every = len(np.union1d(*records))
        self.unlearned = max(chosen.unlearned, rejected.unlearned) + int(equal.sum())
        self.skipped = every - len(common) + min(chosen.skipped, rejected.skipped)
        self.truncated = max(chosen.truncated, rejected.truncated)
        self.without_completion = max(
            chosen.without_completion, rejected.without_completion
        )
        self.repetition = chosen.repetition
        self.has_prompt_ids = chosen.has_prompt_ids
        self.gold = np.zeros(len(self), np.int32)
        self.weights = np.array(
            [_weight(chosen, int(number)) for number in self._numbers[:, 0]], np.float32
        )
        self._prompt_lengths = self._measure_prompts() if share else None
        self.shares_prompt = self._prompt_lengths is not None

    @property
    def chosen(self) -> Examples:
        """The examples of the chosen answers, also of equal ones."""
        return self._sides[0]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the row of the chosen and of the rejected answer."""
        rows = [unweighted(example) for example in self._pair(number)]
        if self._prompt_lengths is None:
            return rows
        prompt = int(self._prompt_lengths[number])
        return [after_prompt(row, prompt) for row in rows]

    @property
    def rows_per_example(self) -> int:
        """Number of rows of a batch that an example takes."""
        return len(ANSWERS)

    @property
    def input_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of inputs of each example's longer row."""
        if self._prompt_lengths is not None:
            return self._prompt_lengths
        return self._longer("input_lengths")

    @property
    def target_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example's longer row."""
        targets = self._longer("target_lengths")
        if self._prompt_lengths is not None and self.chosen.reader.same_tokens:
            targets -= self._prompt_lengths
        return targets

    @property
    def weight_counts(self) -> Int64[np.ndarray, "E"]:
        """Maximum number of learned targets of a row."""
        return self._longer("weight_counts")

    def _longer(self, name: str) -> Int64[np.ndarray, "E"]:
        lengths = [
            getattr(side, name)[numbers]
            for side, numbers in zip(self._sides, self._numbers.T, strict=True)
        ]
        return np.maximum(*lengths)

    def _measure_prompts(self) -> Int64[np.ndarray, "E"] | None:
        """Counts the inputs that precede both answers; None if some pair has others."""
        lengths = []
        for number in range(len(self)):
            chosen, rejected = map(given_tokens, self._pair(number))
            if not np.array_equal(chosen, rejected):
                return None
            lengths.append(len(chosen))
        return np.array(lengths, np.int64)

    def _pair(self, number: int) -> list[Example]:
        numbers = self._numbers[number].tolist()
        return [side[n] for side, n in zip(self._sides, numbers, strict=True)]

    def _equal(self) -> Bool[np.ndarray, "E"]:
        """Returns which pairs have two equal answers."""
        lengths = [
            side.target_lengths[numbers]
            for side, numbers in zip(self._sides, self._numbers.T, strict=True)
        ]
        equal = np.equal(*lengths)
        for number in np.flatnonzero(equal).tolist():
            chosen, rejected = self._pair(number)
            equal[number] = np.array_equal(chosen.targets, rejected.targets)
        return equal


def has_preferences(source: DataSource) -> bool:
    """Returns whether the records of a data source have a chosen and a rejected answer.

    Raises:
      InputError: if the files cannot be read.
    """
    if not reads_text(source):
        return False
    return first_record(files_of(source)[0]).keys() >= set(ANSWERS)


def load_chosen(
    source: DataSource, model: ModelInterface, *, context_ids: Sequence[int] = ()
) -> Examples:
    """Opens the chosen answers of preferences; see `load_examples`."""
    return _load(source, model, ANSWERS[0], context_ids)


def _load(
    source: DataSource,
    model: ModelInterface,
    answer: str,
    context_ids: Sequence[int] = (),
) -> Examples:
    edit = functools.partial(with_prompt, prompt_key=source.prompt_key)
    source = dataclasses.replace(source, completion_key=answer)
    return load_examples(source, model, context_ids=context_ids, edit=edit)


def load_preferences(
    source: DataSource, model: ModelInterface, *, share: bool = False
) -> PreferenceExamples:
    """Opens the files of a data source as preferences.

    Args:
      source: the files, and how they are read.
      model: properties of the model that reads them.
      share: whether the model can read a prompt once for both answers.

    Raises:
      InputError: if a setting, a file or a record cannot be used; see `load_examples`.
    """
    if not has_preferences(source):
        found = "token ids"
        if reads_text(source):
            keys = sorted(first_record(files_of(source)[0]))
            found = f"records with the keys {shown(keys)}"
        raise InputError(
            f"{files_of(source)[0]} contains {found}, but the objective compares "
            f"answers: give records with {ANSWERS[0]!r} and {ANSWERS[1]!r}, and a "
            "prompt"
        )
    if source.use_token_type_ids is False:
        raise InputError(
            "use_token_type_ids is False, so every token is learned, but a preference "
            "compares answers alone: give "
            f"{how_to_set('DataSource.use_token_type_ids', True)}"
        )
    sides = (_load(source, model, answer) for answer in ANSWERS)
    return PreferenceExamples(*sides, share=share)


def _weight(examples: Examples, number: int) -> float:
    """Returns the weight of an example.

    Raises:
      InputError: if nothing precedes its answer, so the model alone cannot score it.
    """
    example = examples[number]
    remedy = "give each record a prompt, or answers that begin alike"
    check_prompt(examples, number, example, remedy)
    return example_weight(example)


def _records(examples: Examples) -> Int64[np.ndarray, "E"]:
    """Returns the number of each example's record.

    Raises:
      InputError: if a record has several examples.
    """
    assert isinstance(examples.rows, JsonlRows)  # preferences are text
    records = np.array(examples.rows.records, np.int64)[examples.index.rows]
    several = np.flatnonzero(np.diff(records) == 0)
    if len(several):
        raise InputError(
            f"{examples.describe(int(several[0]))}: an answer has several learned "
            "messages, expected one message of the assistant after the prompt"
        )
    return records
