import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import token_weights

TYPES = np.array([[0, 0, 0, 1, 1, 1, 3, 2, 2, 2, 2]], np.int32)


def test_every_token_counts_without_types():
    np.testing.assert_array_equal(token_weights(None, (2, 3)), np.ones((2, 3)))


def test_types_are_not_read_unless_requested():
    weights = token_weights(TYPES, TYPES.shape, prompt_loss_weight=0.5)
    np.testing.assert_array_equal(weights, np.ones(TYPES.shape))


def test_requested_types_that_are_missing_are_an_error():
    with pytest.raises(InputError, match="no token_type_ids"):
        token_weights(None, (2, 3), use_token_type_ids=True)


@pytest.mark.parametrize("prompt_loss_weight", [0.0, 0.1, 1.0])
def test_types_decide(prompt_loss_weight):
    weights = token_weights(
        TYPES,
        TYPES.shape,
        use_token_type_ids=True,
        prompt_loss_weight=prompt_loss_weight,
    )
    expected = [[prompt_loss_weight] * 3 + [1] * 4 + [0] * 4]
    np.testing.assert_allclose(weights, expected, rtol=1e-7)
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("input_ids", "types", "learned"),
    [
        ([9, 5, 6, 10, 7, 8, 2], [0, 0, 0, 1, 1, 1, 3], [10, 7, 8, 2]),
        ([9, 5, 6, 10, 7, 8, 2], [1, 1, 0, 0, 1, 1, 3], [9, 5, 7, 8, 2]),
        (
            [9, 5, 6, 10, 7, 8, 2, 69, 69, 69, 69],
            [0, 0, 0, 1, 1, 1, 3, 2, 2, 2, 2],
            [10, 7, 8, 2],
        ),
    ],
)
def test_published_examples_have_loss_on_the_documented_tokens(
    input_ids, types, learned
):
    weights = token_weights(
        np.array(types), (len(types),), use_token_type_ids=True, prompt_loss_weight=0.0
    )
    assert np.array(input_ids)[weights == 1].tolist() == learned
    assert set(weights.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("types", [[0, 4], [-1, 1]])
def test_types_outside_the_four_are_refused(types):
    with pytest.raises(InputError, match=r"expected 0 \(prompt\), 1"):
        token_weights(np.array(types), (2,), use_token_type_ids=True)


def test_types_with_another_shape_are_refused():
    with pytest.raises(InputError, match=r"shape \(1, 11\), expected \(1, 7\)"):
        token_weights(TYPES, (1, 7), use_token_type_ids=True)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_an_invalid_prompt_weight_is_refused(weight):
    with pytest.raises(InputError, match="prompt_loss_weight"):
        token_weights(TYPES, TYPES.shape, prompt_loss_weight=weight)
