"""Tables of the same examples, brought to count the same targets."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.row_readers import Example


def align_examples(tables: Sequence[tuple[str, Examples]]) -> list[Examples]:
    """The tables of some systems, in which all are measured on the same tokens.

    Nothing predicts the first token of a row in a model without a prompt, so it may
    count in one table and not in another. All then weigh what they do in the one that
    counts the fewest, and an example that has no other token is left out of all.

    Args:
      tables: with the systems' names.

    Raises:
      InputError: if tables hold other examples, or count others of their tokens.
    """
    fewest, least = min(tables, key=lambda each: int(each[1].weight_counts.sum()))
    return [
        table if _same(table, least) else _like(table, name, least, fewest)
        for name, table in tables
    ]


class AlignedExamples(Examples):
    """Examples whose targets weigh what they do in another table of them.

    Attributes:
      other: that table, in the same order.
    """

    def __init__(self, own: Examples, other: Examples):
        """Takes those of the examples that are in the other table."""
        counts = {"weight_counts": other.weight_counts}
        chosen = np.isin(_places(own), _places(other))
        super().__init__(
            own.rows,
            own.reader,
            dataclasses.replace(own.index.select(chosen), **counts),
            own.skipped,
            has_prompt_ids=own.has_prompt_ids,
            columns=own.columns,
        )
        self.other = other
        self.uncounted = int(own.weight_counts.sum() - other.weight_counts.sum())

    def __getitem__(self, index: int) -> Example:
        """Example `index`, with the other table's weights."""
        example, other = super().__getitem__(index), self.other[index]
        weights = align_weights(other.weights, len(example.weights))
        return dataclasses.replace(example, weights=weights)


def align_weights(
    weights: Float32[np.ndarray, "n"], length: int
) -> Float32[np.ndarray, "length"]:
    """Weights of as many of the last targets of a row of another length.

    From the right, as a text may stand before what a row has of its own.
    """
    found = np.zeros(length, np.float32)
    shared = min(len(weights), length)
    found[length - shared :] = weights[len(weights) - shared :]
    return found


def _places(table: Examples) -> Int64[np.ndarray, "E"]:
    """A number for the row and the first token of each example, in their order."""
    spans = table.index
    # More than there are tokens in any row.
    return spans.rows * np.int64(2**31) + spans.starts


def _same(one: Examples, other: Examples) -> bool:
    return np.array_equal(_places(one), _places(other)) and np.array_equal(
        one.weight_counts, other.weight_counts
    )


def _like(table: Examples, name: str, other: Examples, other_name: str) -> Examples:
    """A table with the weights of another.

    Raises:
      InputError: if it lacks an example of the other, has one more in which more than
        a first token is learned, or has other tokens where that has weights.
    """
    own, wanted = _places(table), _places(other)
    more = table.weight_counts[~np.isin(own, wanted)]
    if not np.isin(wanted, own).all() or (more > 1).any():
        sizes = {name: len(table), other_name: len(other)}
        fewer, rest = sorted(sizes, key=lambda each: sizes[each])
        raise InputError(
            f"{fewer}: {sizes[fewer]} examples fit, and {sizes[rest]} with {rest}: "
            "they would be compared on different ones; leave out long rows, or shorten "
            "the text"
        )
    found = AlignedExamples(table, other)
    for index in range(len(found)):
        _check_targets(found[index], other[index], index, name, other_name)
    return found


def _check_targets(
    one: Example, other: Example, index: int, name: str, other_name: str
) -> None:
    counted, wanted = one.targets[one.weights != 0], other.targets[other.weights != 0]
    if not np.array_equal(counted, wanted):
        raise InputError(
            f"example {index}: {name} would count {len(counted)} tokens that are not "
            f"the {len(wanted)} that {other_name} counts, so that they cannot "
            "be compared: measure them one by one, or let completions alone count "
            "(DataSource.use_token_type_ids = True, prompt_loss_weight = 0.0)"
        )
