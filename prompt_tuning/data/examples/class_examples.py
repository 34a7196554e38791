"""Examples of a task with classes: each prompt once, with the labels of all classes."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import Architecture
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_groups import ExampleGroups, example_weight
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.examples.truncation import Truncation
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows.row_sources import Repetition


class ClassExamples(ExampleGroups):
    """`E` examples of `C` rows each: the example's prompt with each of `C` labels.

    The row of the correct label is the best one. An example weighs the mean nonzero
    loss weight of its tokens: 1, unless the data contains weights.
    """

    def __init__(
        self,
        examples: Examples | Sequence[Example],
        labels: Sequence[Sequence[int]],
        gold: Sequence[int],
        model: ModelInterface,
        *,
        skip_too_long: bool = False,
        share: bool = False,
    ):
        """Reads each example once to measure it.

        Args:
          examples: examples that give the prompts; their completions are ignored.
          labels: token ids of the `C` labels, including the token that ends them.
          gold: index of the correct label by example.
          model: properties of the model that scores the labels.
          skip_too_long: whether to leave out examples that do not fit with the longest
            label.
          share: whether the model can read a prompt once for all labels.
        """
        self._examples, self._labels = examples, labels
        self._architecture: Architecture = model.architecture
        lengths, weights = zip(
            *(
                (len(prompt_part(x, model.architecture)), example_weight(x))
                for x in map(examples.__getitem__, range(len(examples)))
            ),
            strict=True,
        )
        self._prompt_lengths = np.array(lengths, np.int64)
        self._truncation: Truncation | None = getattr(examples, "truncation", None)
        self.truncated = getattr(examples, "truncated", 0)
        self.unlearned = getattr(examples, "unlearned", 0)
        self.without_completion = getattr(examples, "without_completion", 0)
        self.repetition = getattr(examples, "repetition", Repetition())
        if self._truncation is not None:
            self._truncate_prompts(self._truncation)
        if model.architecture == "decoder_only" and not model.predicts_first_token:
            _check_prompts(self._prompt_lengths)
        fits = self._fits(model.maximum_length)
        if (not skip_too_long and not fits.all()) or not fits.any():
            first = int(np.argmin(fits))
            raise InputError(
                f"{_location(examples, first)}: {lengths[first]} prompt tokens, and "
                f"the longest label {self._longest}: expected at most "
                f"{model.maximum_length} in a row (the model's positions minus the "
                f"prompt vectors{model.positions_note}), whichever the label; to "
                "remove the beginning of such rows, type "
                f"{how_to_set('DataSource.on_too_long', 'truncate')}, and "
                f"to leave them out {how_to_set('DataSource.on_too_long', 'skip')}"
            )
        self._numbers = np.flatnonzero(fits)
        self._prompt_lengths = self._prompt_lengths[fits]
        # A batch has no empty rows of inputs.
        empty = not self._prompt_lengths.all()
        self.shares_prompt = share and len(labels) > 1 and not empty
        self._divided = model.architecture == "encoder_decoder" or self.shares_prompt
        self.rows_per_example = len(labels)
        self.weight_counts = np.full(len(self), self._longest, np.int64)
        self.input_lengths = self._prompt_lengths + self._longest * (not self._divided)
        self.target_lengths = (
            self.weight_counts if self._divided else self.input_lengths
        )
        self.gold = np.asarray(gold, np.int32)[fits]
        self.weights = np.array(weights, np.float32)[fits]
        self.skipped = int(np.count_nonzero(~fits)) + getattr(examples, "skipped", 0)
        self.has_prompt_ids = getattr(examples, "has_prompt_ids", False)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> list[Example]:
        """Returns the rows of one example, one for each label."""
        example = self._examples[int(self._numbers[number])]
        prompt = prompt_part(example, self._architecture).tolist()
        if self._truncation is not None:
            prompt = self._truncation.cut_prompt(
                prompt, int(self._prompt_lengths[number])
            )
        return [
            label_example(prompt, list(label), example.prompt_id, divide=self._divided)
            for label in self._labels
        ]

    def _truncate_prompts(self, truncation: Truncation) -> None:
        """Shortens the prompts, so that even the longest label fits after them."""
        room = truncation.maximum
        if self._architecture == "decoder_only":
            room -= self._longest
        too_long = np.flatnonzero(self._prompt_lengths > room).tolist()
        for number in too_long:
            prompt = prompt_part(self._examples[number], self._architecture)
            try:
                truncation.cut_prompt(prompt.tolist(), room)
            except InputError as error:
                location = _location(self._examples, number)
                raise InputError(
                    f"{location}: with the longest label, the prompt has {error}"
                ) from error
        self.truncated = max(self.truncated, len(too_long))
        self._prompt_lengths = np.minimum(self._prompt_lengths, room)

    @property
    def _longest(self) -> int:
        return max(len(label) for label in self._labels)

    def _fits(self, maximum_length: int | None) -> Bool[np.ndarray, "E"]:
        if maximum_length is None:
            return np.ones(len(self._prompt_lengths), bool)
        if self._architecture == "encoder_decoder":
            return np.maximum(self._prompt_lengths, self._longest) <= maximum_length
        return self._prompt_lengths + self._longest <= maximum_length


def _location(examples: Examples | Sequence[Example], number: int) -> str:
    if isinstance(examples, Examples):
        return examples.describe(number)
    return f"example {number}"


def _check_prompts(lengths: Int64[np.ndarray, "E"]) -> None:
    if not lengths.all():
        raise InputError(
            f"example {int(np.argmin(lengths))} has no prompt token, and neither a "
            "prompt vector nor a beginning-of-sequence token precedes its label, so "
            "there is nothing to predict it from"
        )


def prompt_part(example: Example, architecture: Architecture) -> np.ndarray:
    """Returns the token ids of an example that the model continues or answers."""
    if architecture == "encoder_decoder":
        return example.inputs
    return example.inputs[: example.prefix_length]


def label_example(
    prompt: list[int], label: list[int], prompt_id: int = 0, *, divide: bool
) -> Example:
    """Returns an example with a loss weight only on the tokens of the label.

    With `divide`, prompt and label are inputs and targets instead of one row.
    """
    if divide:
        return Example(
            np.array(prompt, np.int32),
            np.array(label, np.int32),
            np.ones(len(label), np.float32),
            0,
            prompt_id,
        )
    row = np.array([*prompt, *label], np.int32)
    weights = np.zeros(len(row), np.float32)
    weights[len(prompt) :] = 1
    return Example(row, row, weights, len(prompt), prompt_id)
