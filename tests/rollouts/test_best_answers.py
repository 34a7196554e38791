"""The best earlier answers of a run that is resumed."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.training.rollouts.best_answers import BestAnswers

BEST = {"prompt": 0, "ids": [3, 1], "logprobs": [-0.5, -1], "rewards": [1.0]}


def resumed(**changes):
    best = BestAnswers(vocabulary_size=10, rewards=1)
    line = {"step": 2, "completion": "a", "reward": 1.0, "truncated": False}
    best.resume(JsonObject("line 1", {**line, "best": {**BEST, **changes}}))
    return best


def test_an_answer_is_taken_over_with_its_probabilities():
    kept = resumed().better(0, 0.5)
    assert kept is not None and kept.step == 2
    assert kept.answer.ids == (3, 1) and kept.answer.logprobs == (-0.5, -1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": [3, 10]}, "expected a list of whole numbers from 0 to 9"),
        ({"logprobs": [-0.5]}, "expected a list of 2"),
        ({"logprobs": [-0.5, "a"]}, "logprobs in best in line 1 has 1 = 'a'"),
        ({"logprobs": [-0.5, 10**400]}, "expected a finite number"),
        ({"rewards": []}, "expected a list of 1"),
        ({"rewards": [None]}, "has no '0'"),
    ],
)
def test_a_damaged_answer_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        resumed(**changes)
