import inspect

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.tools.inspection import nearest_tokens

TABLE = np.array([[3.0, 0.0], [0.0, 2.0], [5.0, 5.0], [-1.0, 0.0]], np.float32)


def test_tokens_are_ranked_by_angle_and_not_by_length():
    (first,) = nearest_tokens(np.array([[8.0, 6.0]], np.float32), TABLE, 4)
    assert first.norm == 10.0
    assert first.tokens == (2, 0, 1, 3)
    assert first.similarities == pytest.approx((1.4 / 2**0.5, 0.8, 0.6, -0.8))


def test_a_vector_taken_from_the_vocabulary_finds_itself():
    table = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    nearest = nearest_tokens(7 * table[[4, 40]], table, 1)
    assert [neighbors.tokens for neighbors in nearest] == [(4,), (40,)]
    assert [neighbors.similarities[0] for neighbors in nearest] == pytest.approx([1, 1])


def test_a_vector_of_zeros_is_similar_to_no_token():
    (neighbors,) = nearest_tokens(np.zeros((1, 2), np.float32), TABLE, 2)
    assert neighbors.norm == 0 and neighbors.similarities == (0, 0)


def test_requesting_too_many_tokens_returns_all():
    (neighbors,) = nearest_tokens(np.ones((1, 2), np.float32), TABLE, 10)
    assert sorted(neighbors.tokens) == [0, 1, 2, 3]


def test_a_prompt_of_another_width_is_refused():
    # jaxtyping would raise first; the function without it raises the user's error.
    unchecked = inspect.unwrap(nearest_tokens)
    with pytest.raises(InputError, match="3 wide and the model's embeddings are 2"):
        unchecked(np.ones((1, 3), np.float32), TABLE, 1)


def test_at_least_one_token_is_requested():
    with pytest.raises(InputError, match="0 nearest tokens were requested"):
        nearest_tokens(np.ones((1, 2), np.float32), TABLE, 0)
