"""Examples of a task with classes: what is given, once with each class's label."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import Architecture
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


class Candidates:
    """`E` examples, each of which is `C` rows: its given text with each label.

    A plan of batches takes it for a table of examples, as long as their longest rows;
    `build_batch` puts the rows of an example one after the other.

    Attributes:
      gold: which of the labels is right, of each example.
      weights: what each example weighs: its learned tokens' mean weight, which is 1
        unless the data says otherwise; float32 `[E]`.
      skipped: how many were left out because they were too long.
      has_prompt_ids: whether the data says which prompt each has.
    """

    def __init__(
        self,
        examples: Examples | Sequence[Example],
        labels: Sequence[Sequence[int]],
        gold: Sequence[int],
        *,
        architecture: Architecture,
        maximum_length: int | None = None,
        predicts_first_token: bool = True,
        skip_too_long: bool = False,
    ):
        """Measures the examples, each of which is read once.

        Args:
          examples: of which what is given is used.
          labels: token ids of the `C` labels, with what ends them.
          gold: the right label of each example.
          architecture: of the model.
          maximum_length: of a row; None if there is no end.
          predicts_first_token: whether a prompt vector stands before a decoder-only
            row.
          skip_too_long: whether to leave out examples that do not fit with the longest
            label.

        Raises:
          InputError: if there is nothing before a label that predicts it, or an example
            is too long.
        """
        self._examples, self._labels = examples, labels
        self._architecture: Architecture = architecture
        measured = [_measured(examples[i], architecture) for i in range(len(examples))]
        lengths = [length for length, _ in measured]
        self._given = np.array(lengths, np.int64)
        if architecture == "decoder_only" and not predicts_first_token:
            _check_given(self._given)
        kept = self._fits(maximum_length)
        if (not skip_too_long and not kept.all()) or not kept.any():
            first = int(np.argmin(kept))
            raise InputError(
                f"example {first} has {lengths[first]} given tokens, and the longest "
                f"label {self._longest}: expected at most {maximum_length} in a row "
                "(the model's positions minus the prompt's vectors), whichever the "
                "label; shorten it, or set on_too_long='skip' to leave such rows out"
            )
        self._numbers = np.flatnonzero(kept)
        self._given = self._given[kept]
        self.gold = np.asarray(gold, np.int32)[kept]
        self.weights = np.array([weight for _, weight in measured], np.float32)[kept]
        self.skipped = int(np.count_nonzero(~kept)) + getattr(examples, "skipped", 0)
        self.has_prompt_ids = getattr(examples, "has_prompt_ids", False)
        self.columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> list[Example]:
        """The rows of example `index`, one for each label."""
        example = self._examples[int(self._numbers[index])]
        before = given_part(example, self._architecture).tolist()
        return [
            labelled(self._architecture, before, list(label), example.prompt_id)
            for label in self._labels
        ]

    @property
    def classes(self) -> int:
        """`C`."""
        return len(self._labels)

    @property
    def input_lengths(self) -> Int64[np.ndarray, "E"]:
        """Inputs of each example's longest row."""
        if self._architecture == "encoder_decoder":
            return self._given
        return self._given + self._longest

    @property
    def target_lengths(self) -> Int64[np.ndarray, "E"]:
        """Targets of each example's longest row."""
        if self._architecture == "encoder_decoder":
            return self.weight_counts
        return self.input_lengths

    @property
    def weight_counts(self) -> Int64[np.ndarray, "E"]:
        """Most targets of a row whose weight is not zero."""
        return np.full(len(self), self._longest, np.int64)

    @property
    def _longest(self) -> int:
        return max(len(label) for label in self._labels)

    def _fits(self, maximum_length: int | None) -> np.ndarray:
        if maximum_length is None:
            return np.ones(len(self._given), bool)
        if self._architecture == "encoder_decoder":
            return np.maximum(self._given, self._longest) <= maximum_length
        return self._given + self._longest <= maximum_length


def _measured(example: Example, architecture: Architecture) -> tuple[int, float]:
    """How many tokens are given, and what the answer weighs."""
    learned = example.weights[example.prefix_length :]
    weight = float(np.mean(learned[learned > 0])) if np.any(learned > 0) else 1.0
    return len(given_part(example, architecture)), weight


def _check_given(lengths: Int64[np.ndarray, "E"]) -> None:
    if not lengths.all():
        raise InputError(
            f"example {int(np.argmin(lengths))} has no given token, and no prompt "
            "vector or beginning-of-sequence token stands before its label, so there "
            "is nothing to predict it from"
        )


def given_part(example: Example, architecture: Architecture) -> np.ndarray:
    """What the model is given of an example, to continue or to answer."""
    if architecture == "encoder_decoder":
        return example.inputs
    return example.inputs[: example.prefix_length]


def labelled(
    architecture: Architecture,
    given: list[int],
    label: list[int],
    prompt_id: int = 0,
) -> Example:
    """An example in which the label alone carries weight."""
    if architecture == "encoder_decoder":
        return Example(
            np.array(given, np.int32),
            np.array(label, np.int32),
            np.ones(len(label), np.float32),
            0,
            prompt_id,
        )
    row = np.array([*given, *label], np.int32)
    weights = np.zeros(len(row), np.float32)
    weights[len(given) :] = 1
    return Example(row, row, weights, len(given), prompt_id)
