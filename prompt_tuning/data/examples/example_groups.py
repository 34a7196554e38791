"""Examples that are groups of rows, which an objective compares."""

import abc
import dataclasses
from collections.abc import Collection

import numpy as np
from jaxtyping import Float32, Int32, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.context_column import ContextColumn
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.data.rows.row_sources import Repetition


class ExampleGroups(abc.ABC):
    """`E` examples of `C` rows each.

    A batch plan treats them as a table of examples, each as long as its longest row;
    `build_batch` puts the rows of an example one after the other.

    Attributes:
      gold: number of the best row of each example, or its rating, `[E]`.
      weights: weight of each example, float32 `[E]`.
      skipped: number of examples left out because they are too long.
      truncated: number of examples that are cut.
      unlearned: number of examples left out because nothing in them is learned.
      without_completion: number of records left out because they have no completion.
      repetition: see `RowSource`.
      has_prompt_ids: whether the data selects the prompt of each example.
      columns: names of the columns for an objective, perhaps with their types; see
        `build_batch`.
      contexts: column of the text that a teacher reads before each, or None.
      context_numbers: number of each example's text, if there is that column, `[E]`.
      has_groups: whether an example consists of several rows; always True.
      shares_prompt: whether the rows of an example begin with one prompt, which a batch
        has once. Their inputs are then the prompt alone, and their targets what follows
        it, also if the model is decoder-only.
    """

    columns: Collection[str] = ()
    contexts: ContextColumn | None = None
    has_groups = True
    shares_prompt = False

    context_numbers: Int64[np.ndarray, "E"]
    gold: Int32[np.ndarray, "E"]
    weights: Float32[np.ndarray, "E"]
    skipped: int
    truncated: int
    unlearned: int
    without_completion: int
    repetition: Repetition
    has_prompt_ids: bool

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, number: int) -> list[Example]:
        """Returns the rows of one example."""

    @property
    @abc.abstractmethod
    def rows_per_example(self) -> int:
        """Number of rows of a batch that an example takes, `C`."""

    @property
    @abc.abstractmethod
    def input_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of inputs of each example's longest row."""

    @property
    @abc.abstractmethod
    def target_lengths(self) -> Int64[np.ndarray, "E"]:
        """Number of targets of each example's longest row."""

    @property
    @abc.abstractmethod
    def weight_counts(self) -> Int64[np.ndarray, "E"]:
        """Maximum number of targets of a row with nonzero loss weight."""


def check_prompt(
    examples: Examples, number: int, example: Example, remedy: str
) -> None:
    """Checks that the model without what is trained can score an answer.

    Args:
      examples: table of the examples.
      number: number of the example in it.
      example: the prompt and the answer.
      remedy: what to give instead.

    Raises:
      InputError: if nothing precedes the answer.
    """
    if examples.reader.same_tokens and example.weights[0]:
        raise InputError(
            f"{examples.describe(number)}: the prompt is empty, so the model without "
            "what is trained has nothing to predict the first token of an answer from; "
            f"{remedy}"
        )


def given_tokens(example: Example) -> Int32[np.ndarray, "n"]:
    """Returns the inputs that precede what is learned of an example."""
    # An encoder-decoder has no completion tokens among its inputs, and no prefix.
    return example.inputs[: example.prefix_length or None]


def after_prompt(example: Example, length: int) -> Example:
    """Divides the tokens of a row into inputs, the first `length`, and targets.

    The example of an encoder-decoder is divided already.
    """
    if not example.prefix_length:
        return example
    return dataclasses.replace(
        example,
        inputs=example.inputs[:length],
        targets=example.targets[length:],
        weights=example.weights[length:],
        columns={name: values[length:] for name, values in example.columns.items()},
    )


def unweighted(example: Example) -> Example:
    """Returns an example whose learned tokens all weigh 1, without columns."""
    weights = (example.weights > 0).astype(np.float32)
    return dataclasses.replace(example, weights=weights, columns={})


def example_weight(example: Example) -> float:
    """Returns the mean nonzero loss weight of an example's completion, or else 1."""
    weights = example.weights[example.prefix_length :]
    return float(np.mean(weights[weights > 0])) if np.any(weights > 0) else 1.0
