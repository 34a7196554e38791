"""How an example selects its prompt: by its first token, a key or a name."""

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.tasks import Tasks, TaskToken


def test_the_sentinels_of_t5_number_tasks_downwards():
    # <extra_id_0> is 32099 in T5's vocabulary, <extra_id_7> is 32092.
    ids = np.array([[32099, 5, 1], [32092, 6, 1]])
    tasks, rest = TaskToken(32100).split(ids)
    assert tasks.tolist() == [0, 7]
    assert rest.tolist() == [[5, 1], [6, 1]]


def test_an_index_is_the_task_itself():
    tasks, rest = TaskToken(position=1).split(np.array([9, 3, 8, 7], np.uint16))
    assert (int(tasks), rest.tolist()) == (3, [9, 8, 7])
    with pytest.raises(InputError, match="1 tokens, but token 1 should be"):
        TaskToken(position=1).split(np.array([9]))


def test_a_line_gives_its_tasks_number_or_name():
    assert Tasks(3, "task").parse(2, "line 1") == 2
    named = Tasks(3, "task", ["boolq", "rte", "wic"])
    assert named.parse("rte", "line 1") == 1
    assert named.parse(2, "line 1") == 2
    for value in ("mnli", True, 1.0, None, [1]):
        with pytest.raises(InputError, match=r"line 1: 'task' is .* one of \['boolq'"):
            named.parse(value, "line 1")
        with pytest.raises(InputError, match="expected an integer; or names, in order"):
            Tasks(3, "task").parse(value, "line 1")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({}, "set one of them"),
        ({"key": "task", "token": TaskToken()}, "set one of them"),
        ({"token": TaskToken(), "names": ["a", "b"]}, "but not the prompt_id_key"),
        ({"key": "task", "names": ["a"]}, "expected a list of 2 different"),
        ({"key": "task", "names": ["a", "a"]}, "expected a list of 2 different"),
        ({"key": "task", "names": "ab"}, "expected a list of 2 different"),
    ],
)
def test_choices_that_do_not_select_the_task_are_refused(choices, message):
    with pytest.raises(InputError, match=message):
        Tasks(2, **choices)
