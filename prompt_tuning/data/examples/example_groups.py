"""Examples that take more than one row, which an objective compares."""

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
    `build_batch` puts the rows of an example one after the other. Attributes without a
    description here are as in `Examples`.

    Attributes:
      gold: number of the best row by example, or its rating, `[E]`.
      weights: weight by example, float32 `[E]`.
      rows_per_example: number of rows of a batch that an example takes, `C`.
      input_lengths: number of inputs of the longest row by example, `[E]`.
      target_lengths: number of targets of the longest row by example, `[E]`.
      weight_counts: maximum number of learned targets of a row by example, `[E]`.
      columns: names of the columns for an objective, perhaps with their types; see
        `build_batch`.
      context_numbers: numbers of the examples' texts among `contexts`, `[E]`.
      has_groups: whether an example consists of more than one row; always True.
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
    rows_per_example: int
    input_lengths: Int64[np.ndarray, "E"]
    target_lengths: Int64[np.ndarray, "E"]
    weight_counts: Int64[np.ndarray, "E"]
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


def check_prompt(
    examples: Examples, number: int, example: Example, remedy: str
) -> None:
    """Refuses an answer that nothing precedes, if the model without a prompt scores it.

    `remedy` ends the message.
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
    """Returns an example with weight 1 for every learned token, without columns."""
    weights = (example.weights > 0).astype(np.float32)
    return dataclasses.replace(example, weights=weights, columns={})


def example_weight(example: Example) -> float:
    """Returns the mean nonzero loss weight of an example's completion, or else 1."""
    weights = example.weights[example.prefix_length :]
    return float(np.mean(weights[weights > 0])) if np.any(weights > 0) else 1.0
