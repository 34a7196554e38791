"""Compares packing with a simple reference that packs one example at a time."""

import itertools

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import PACKINGS, parse_packing
from prompt_tuning.data.preparation.sequence_packing import Packer

LENGTH = 5
PADDING = -7


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def packed(choice, examples, *, batches=1):
    packer = Packer(parse_packing(choice), LENGTH, np.array([PADDING], np.int32))
    rows = []
    for part in np.array_split(np.arange(len(examples)), batches):
        chosen = [examples[i] for i in part]
        tokens = np.array([joined(chosen)], np.int32).reshape(1, -1)
        lengths = np.array([len(each) for each in chosen], np.int64)
        rows += [row for full in packer.add(tokens, lengths) for row in full[0]]
    rows += list(packer.finish()[0])
    return [row.tolist() for row in rows], packer


def reference_packing(choice, examples):
    how, _, overflow = choice.partition("::")
    if how == "full":
        flat = joined(examples)
        rows = [flat[at : at + LENGTH] for at in range(0, len(flat), LENGTH)]
        return [row + [PADDING] * (LENGTH - len(row)) for row in rows]
    rows = []
    for example in examples:
        if len(example) > LENGTH:
            if overflow == "drop" and how == "greedy" and rows:
                rows[-1] = rows[-1] + [PADDING] * (LENGTH - len(rows[-1]))
            if overflow in ("drop", "fill"):
                continue
            cut = {"truncate_left": slice(-LENGTH, None), "truncate_right": slice(5)}
            example = example[cut[overflow]]
        if how == "greedy" and rows and len(rows[-1]) + len(example) <= LENGTH:
            rows[-1] = rows[-1] + example
        else:
            rows.append(example)
    return [row + [PADDING] * (LENGTH - len(row)) for row in rows]


@pytest.mark.parametrize("choice", PACKINGS)
def test_every_option_packs_the_same_as_one_example_at_a_time(choice):
    random = np.random.default_rng(0)
    for _ in range(60):
        sizes = random.integers(1, 9, size=random.integers(0, 14))
        tokens = iter(range(1000))
        examples = [[next(tokens) for _ in range(size)] for size in sizes]
        expected = reference_packing(choice, examples)
        for batches in (1, 3):
            rows, _ = packed(choice, examples, batches=batches)
            assert rows == expected


def test_rows_that_do_not_fit_are_counted():
    examples = [[1] * 7, [2] * 3, [3] * 9]
    _, dropping = packed("greedy::drop", examples)
    assert dropping.dropped.tolist() == [2, 16]
    _, cutting = packed("single::truncate_left", examples)
    assert cutting.truncated.tolist() == [2, 6]
    assert not cutting.dropped.any()


@pytest.mark.parametrize("batches", [1, 4])
def test_a_dropped_example_ends_the_sequence_before_it(batches):
    """As in generative_data_prep, which pads a sequence at whatever does not fit."""
    examples = [[1] * 2, [2] * 9, [3] * 2, [4] * 6]
    assert packed("greedy::drop", examples, batches=batches)[0] == [
        [1, 1, PADDING, PADDING, PADDING],
        [3, 3, PADDING, PADDING, PADDING],
    ]
    filled, packer = packed("greedy::fill", examples, batches=batches)
    assert filled == [[1, 1, 3, 3, PADDING]] and packer.dropped.tolist() == [2, 15]


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [("drop", [5, 4, 5]), ("truncate_left", [5, 5, 4, 5])],
)
def test_published_examples_are_packed_as_there(overflow, expected):
    """Lengths of `tests/test_sequence_packer.py` of generative_data_prep."""
    examples = [[1] * size for size in (3, 2, 10, 2, 2, 5)]
    rows, _ = packed(f"greedy::{overflow}", examples)
    assert [LENGTH - row.count(PADDING) for row in rows] == expected
    assert packed("greedy::drop", [[1] * 6] * 4)[0] == []


def test_full_loses_nothing():
    rows, packer = packed("full", [[1] * 7, [2] * 5])
    assert rows == [[1] * 5, [1, 1, 2, 2, 2], [2, 2, PADDING, PADDING, PADDING]]
    assert not packer.dropped.any() and not packer.truncated.any()


@pytest.mark.parametrize("choice", ["full::drop", "greedy", "single::cut", ""])
def test_other_choices_are_refused(choice):
    with pytest.raises(InputError, match="expected one of full, greedy::drop"):
        parse_packing(choice)
