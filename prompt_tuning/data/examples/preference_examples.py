"""Examples of two answers to one prompt, where one is preferred."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.utf8_text import common_beginning
from prompt_tuning.data.examples import example_groups
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.rows.line_formats import first_record
from prompt_tuning.data.source_reading import files_of, reads_text
from prompt_tuning.data.text.conversations import (
    INPUT_KEYS,
    INSTRUCTION_KEY,
    conversation_key,
    has_messages,
    read_task,
)
from prompt_tuning.settings.data_source import DataSource

CHOSEN, REJECTED = "chosen", "rejected"
ANSWERS = (CHOSEN, REJECTED)
"""Keys of the two answers, the better one first, as published data name them."""


def with_prompt(content: Mapping[str, Any], prompt_key: str | None) -> dict[str, Any]:
    """Returns a record with a prompt of the same kind as its two answers.

    Published data often repeat the prompt at the start of both answers: two whole
    conversations, with or without a prompt as text, or two texts without a prompt.
    Their common beginning is then the prompt. Others have the prompt as a conversation
    or a task, and each answer as one message. Other records, also those without two
    answers, are returned as they are.
    """
    record = dict(content)
    if prompt_key is None or not all(key in content for key in ANSWERS):
        return record
    answers = [_as_messages(content[key]) for key in ANSWERS]
    talk = all(has_messages(answer) for answer in answers)
    if not talk and not all(isinstance(answer, str) for answer in answers):
        return record
    named = conversation_key(content)
    if named is not None and content[named] == answers[0]:
        del record[named]  # the better conversation, once more
        named = None
    record |= zip(ANSWERS, answers, strict=True)
    prompt = content.get(prompt_key) or _other_prompt(record, named)
    if talk and isinstance(prompt, str) and max(map(len, answers)) == 1:
        prompt = [{"role": "user", "content": prompt}]
    if prompt and (has_messages(prompt) or not talk):
        return record | {prompt_key: prompt}
    count = _common_messages(*answers) if talk else _common_letters(*answers)
    record |= {key: x[count:] for key, x in zip(ANSWERS, answers, strict=True)}
    return record | {prompt_key: answers[0][:count]}


def _as_messages(answer: Any) -> Any:
    """Returns an answer that is a single message as a list of it, and others as is."""
    return [answer] if isinstance(answer, dict) else answer


def _other_prompt(record: dict[str, Any], named: str | None) -> Any:
    """Takes the prompt of a conversation, whose key is `named`, or of a task."""
    if named is not None:
        return record.pop(named)
    if INSTRUCTION_KEY not in record:
        return None
    prompt = read_task(record, "the record")
    for key in (INSTRUCTION_KEY, *INPUT_KEYS):
        record.pop(key, None)
    return prompt


def _common_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Counts equal messages at the start; each conversation keeps its last one."""
    most = min(len(chosen), len(rejected)) - 1
    count = 0
    while count < most and chosen[count] == rejected[count]:
        count += 1
    return count


def _common_letters(chosen: str, rejected: str) -> int:
    """Counts the letters that two texts begin with.

    A space at their end belongs to the answers, as tokenizers join it to the next word.
    """
    common = common_beginning(chosen, rejected)
    return len(common) - common.endswith(" ")


class PreferenceExamples(example_groups.ExampleGroups):
    """`E` examples of two rows each: a prompt with a chosen and a rejected answer.

    If `share` allows it and both answers follow the same prompt, it is read once.

    Records with two equal answers teach nothing and are left out. So are records with
    an empty answer, and records with a long one where long rows are skipped.
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
        self.rows_per_example = len(ANSWERS)
        self.input_lengths = self._longer("input_lengths")
        self.target_lengths = self._longer("target_lengths")
        self.weight_counts = self._longer("weight_counts")
        if self._prompt_lengths is not None:
            self.input_lengths = self._prompt_lengths
            if chosen.reader.same_tokens:
                self.target_lengths -= self._prompt_lengths

    @property
    def chosen(self) -> Examples:
        """The examples of the chosen answers, also of equal ones."""
        return self._sides[0]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the row of the chosen and of the rejected answer."""
        rows = [example_groups.unweighted(example) for example in self._pair(number)]
        if self._prompt_lengths is None:
            return rows
        prompt = int(self._prompt_lengths[number])
        return [example_groups.after_prompt(row, prompt) for row in rows]

    def _longer(self, name: str) -> Int64[np.ndarray, "E"]:
        lengths = [
            getattr(side, name)[numbers]
            for side, numbers in zip(self._sides, self._numbers.T, strict=True)
        ]
        return np.maximum(*lengths)

    def _measure_prompts(self) -> Int64[np.ndarray, "E"] | None:
        """Counts the inputs before both answers; None if they differ in some pair."""
        lengths = []
        for number in range(len(self)):
            chosen, rejected = map(example_groups.given_tokens, self._pair(number))
            if not np.array_equal(chosen, rejected):
                return None
            lengths.append(len(chosen))
        return np.array(lengths, np.int64)

    def _pair(self, number: int) -> list[Example]:
        numbers = self._numbers[number].tolist()
        return [side[n] for side, n in zip(self._sides, numbers, strict=True)]

    def _equal(self) -> Bool[np.ndarray, "E"]:
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
    """Tests whether records have a chosen and a rejected answer."""
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
    """Opens the files of a data source as preferences; see `load_examples`.

    `share` tells whether the model can read a prompt once for both answers.
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
    example = examples[number]
    remedy = "give each record a prompt, or answers that begin alike"
    example_groups.check_prompt(examples, number, example, remedy)
    return example_groups.example_weight(example)


def _records(examples: Examples) -> Int64[np.ndarray, "E"]:
    """Returns the numbers of the examples' records, which have one example each."""
    assert isinstance(examples.rows, JsonlRows)  # preferences are text
    records = np.array(examples.rows.records, np.int64)[examples.index.rows]
    several = np.flatnonzero(np.diff(records) == 0)
    if len(several):
        raise InputError(
            f"{examples.describe(int(several[0]))}: an answer has several learned "
            "messages, expected one message of the assistant after the prompt"
        )
    return records
