"""Learned tokens decide whether a completion would be generated."""

import numpy as np
import pytest

from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.evaluation.exact_match import CompletionPlaces, decide_by_tokens
from prompt_tuning.evaluation.token_outcomes import TokenOutcomes

ALL, GIVEN_TOO, FIRST, WITHOUT_END = (
    [0, 0, 1, 1, 1],
    [0, 1, 1, 1, 1],
    [0, 0, 1, 0, 1],
    [0, 0, 1, 1, 0],
)
"""Loss weights of two given tokens, two of the completion, and its end."""


@pytest.mark.parametrize(
    ("weights", "correct", "new_tokens", "stop_ids", "expected"),
    [
        (ALL, [1, 1, 1], 8, [9], True),
        (ALL, [1, 0, 1], 8, [9], False),
        (ALL, [1, 1, 0], 8, [9], False),
        # Another end token may be the most probable one.
        (ALL, [1, 1, 0], 8, [9, 7], None),
        # A text of the maximum length needs no end.
        (ALL, [1, 1, 0], 2, [9], True),
        (ALL, [1, 1, 1], 1, [9], False),
        (GIVEN_TOO, [0, 1, 1, 1], 8, [9], True),
        (GIVEN_TOO, [1, 0, 1, 1], 8, [9], False),
        (FIRST, [1, 1], 8, [9], None),
        (FIRST, [0, 1], 8, [9], False),
        (WITHOUT_END, [1, 1], 8, [9], None),
        (WITHOUT_END, [1, 1], 2, [9], True),
    ],
)
def test_learned_tokens_decide_if_they_can(
    weights, correct, new_tokens, stop_ids, expected
):
    ids = np.array([3, 4, 5, 6, 9], np.int32)
    example = Example(ids, ids, np.array(weights, np.float32), prefix_length=2)
    places = CompletionPlaces.find(example, [5, 6], new_tokens)
    assert places.decide(np.array(correct, bool), stop_ids) is expected


def test_each_example_has_its_own_tokens():
    ids = np.array([3, 5, 9], np.int32)
    example = Example(ids, ids, np.array([0, 1, 1], np.float32), prefix_length=1)
    places = CompletionPlaces.find(example, [5], 8)
    correct = np.array([1, 1, 0, 1, 1, 1], bool)
    of_example = np.array([0, 0, 1, 1, 2, 2])
    zeros = np.zeros(6)
    outcomes = TokenOutcomes(3, of_example, zeros, zeros, correct)
    assert decide_by_tokens(outcomes, [places, places, None], [9]) == [
        True,
        False,
        None,
    ]
