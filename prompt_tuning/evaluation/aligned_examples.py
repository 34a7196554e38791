"""Align tables of examples so that models are compared on the same tokens."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


def align_examples(tables: Sequence[tuple[str, Examples]]) -> list[Examples]:
    """Aligns the models' tables so that all of them count the same tokens.

    A model without a prompt cannot predict the first token of a row, so that token may
    count in one table and not in another. All tables therefore use the weights of the
    table that counts the fewest tokens, and examples with no other learned token are
    left out everywhere.

    Raises:
      InputError: if tables contain different examples, or learn different tokens.
    """
    smallest_name, smallest = min(
        tables, key=lambda each: int(each[1].weight_counts.sum())
    )
    return [_align(table, name, smallest, smallest_name) for name, table in tables]


class AlignedExamples(Examples):
    """Examples with the target weights of another table.

    Attributes:
      other: the other table, with the same examples in the same order.
    """

    def __init__(self, table: Examples, other: Examples):
        """Selects the examples of the other table."""
        counts = {"weight_counts": other.weight_counts}
        chosen = np.isin(_example_keys(table), _example_keys(other))
        self.__dict__.update(table.__dict__)
        self.index = dataclasses.replace(table.index.select(chosen), **counts)
        self.other = other
        self.uncounted = int(table.weight_counts.sum() - other.weight_counts.sum())

    def __getitem__(self, index: int) -> Example:
        example, other = super().__getitem__(index), self.other[index]
        weights = align_weights(other.weights, len(example.weights))
        return dataclasses.replace(example, weights=weights)


def align_weights(
    weights: Float32[np.ndarray, "n"], length: int
) -> Float32[np.ndarray, "length"]:
    """Copies weights to a row of another length, aligned at the last target.

    Rows are aligned at the end because a text may be inserted before their tokens.
    """
    aligned = np.zeros(length, np.float32)
    shared = min(len(weights), length)
    aligned[length - shared :] = weights[len(weights) - shared :]
    return aligned


def _example_keys(table: Examples) -> Int64[np.ndarray, "E"]:
    """Returns a number per example that identifies its row and first token."""
    spans = table.index
    # 2**31 exceeds the length of every row.
    return spans.rows * np.int64(2**31) + spans.starts


def _align(table: Examples, name: str, other: Examples, other_name: str) -> Examples:
    """Returns a table with the weights of another."""
    keys, other_keys = _example_keys(table), _example_keys(other)
    counts, other_counts = table.weight_counts, other.weight_counts
    if np.array_equal(keys, other_keys) and np.array_equal(counts, other_counts):
        return table
    additional = counts[~np.isin(keys, other_keys)]
    if not np.isin(other_keys, keys).all() or (additional > 1).any():
        sizes = {name: len(table), other_name: len(other)}
        smaller, larger = sorted(sizes, key=lambda each: sizes[each])
        raise InputError(
            f"{smaller}: {sizes[smaller]} examples fit, and {sizes[larger]} with "
            f"{larger}, so they cannot be compared on the same examples; leave out "
            "long rows, or shorten the text"
        )
    aligned = AlignedExamples(table, other)
    for index in range(len(aligned)):
        _check_targets(aligned[index], other[index], index, name, other_name)
    return aligned


def _check_targets(
    one: Example, other: Example, index: int, name: str, other_name: str
) -> None:
    learned = one.targets[one.weights != 0]
    expected = other.targets[other.weights != 0]
    if not np.array_equal(learned, expected):
        raise InputError(
            f"example {index}: {name} would count {len(learned)} tokens, which differ "
            f"from the {len(expected)} that {other_name} counts, so they cannot be "
            "compared: a text before a row changed how the row is encoded, or prompts "
            "are learned too. Measure each alone; let completions begin with a space "
            "or a line break; or learn completions only: "
            f"{how_to_set('DataSource.use_token_type_ids', True)} "
            f"{how_to_set('DataSource.prompt_loss_weight', 0.0)}"
        )
