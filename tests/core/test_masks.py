import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import masks
from prompt_tuning.core.errors import InputError


def matrices(mask, queries):
    """Converts each row's mask to a matrix of zeros and ones."""
    rows, _, _, keys = mask.shape
    return np.broadcast_to(mask, (rows, 1, queries, keys))[:, 0].astype(int).tolist()


def test_an_encoders_tokens_and_prompt_attend_to_each_other_but_not_to_padding():
    # One prompt vector, and 2 and 0 real tokens of at most 2.
    mask = jax.jit(masks.encoder_mask, static_argnums=1)(jnp.array([3, 1]), 3)
    assert matrices(mask, 3) == [
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]],
    ]


def test_a_causal_decoder_attends_to_itself_and_earlier_tokens():
    mask = jax.jit(masks.decoder_causal_mask, static_argnums=0)(4)
    assert matrices(mask, 4) == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    ]


# Two prompt vectors, two real tokens and one padding token, for each combination of
# the attention types of google-research/prompt-tuning. Only the prompt's rows are
# listed: text attends to prompt and text in all of them.
P_P, P_P_CAUSAL, P_I = "prompt->prompt", "prompt->prompt;causal", "prompt->input"
COMBINATIONS = [
    ([], [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]),
    ([P_P], [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]),
    ([P_P_CAUSAL], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
    ([P_I], [[1, 0, 1, 1, 0], [0, 1, 1, 1, 0]]),
    ([P_P, P_I], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
    ([P_P_CAUSAL, P_I], [[1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]),
    ([P_P, P_P_CAUSAL], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]),
    ([P_P, P_P_CAUSAL, P_I], [[1, 0, 1, 1, 0], [1, 1, 1, 1, 0]]),
]
IS_PROMPT = jnp.array([[1, 1, 0, 0, 0]], bool)
SEGMENTS = jnp.array([[1, 1, 1, 1, 0]])


@pytest.mark.parametrize("always", [[], ["input->input", "input->prompt"]])
@pytest.mark.parametrize(("names", "of_prompt"), COMBINATIONS)
def test_an_encoders_prompt_attends_as_configured_and_the_text_to_all(
    names, of_prompt, always
):
    sees = masks.Visibility.from_names([*names, *always])
    mask = jax.jit(masks.region_mask, static_argnums=1)(IS_PROMPT, sees)
    mask &= masks.segment_mask(SEGMENTS, SEGMENTS)
    text = [1, 1, 1, 1, 0]
    assert matrices(mask, 5)[0][:4] == [*of_prompt, text, text]


@pytest.mark.parametrize(("names", "of_prompt"), COMBINATIONS)
def test_given_tokens_of_a_prefix_decoder_do_not_attend_to_causal_targets(
    names, of_prompt
):
    # Two prompt vectors, two given tokens, one target.
    region = jnp.array([[1, 1, 1, 1, 0]], bool)
    sees = masks.Visibility.from_names(names)
    compute = jax.jit(masks.decoder_region_mask, static_argnums=2)
    given = [1, 1, 1, 1, 0]
    expected = [*of_prompt, given, given, [1, 1, 1, 1, 1]]
    assert matrices(compute(region, IS_PROMPT, sees), 5)[0] == expected


def test_given_tokens_attend_to_a_later_prompt_under_prefix_attention():
    region = jnp.array([[1, 1, 1, 0, 0]], bool)
    is_prompt = jnp.array([[0, 1, 1, 0, 0]], bool)
    sees = masks.Visibility.from_names([P_P_CAUSAL])
    mask = masks.decoder_region_mask(region, is_prompt, sees)
    assert matrices(mask, 5)[0] == [
        [1, 1, 1, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def test_unknown_visibility_is_refused():
    with pytest.raises(InputError, match="visibility names 'prompt->text', expected"):
        masks.Visibility.from_names(["prompt->prompt", "prompt->text"])


def test_examples_of_a_packed_row_attend_only_to_themselves():
    segments = jnp.array([[1, 1, 2, 0]])
    mask = jax.jit(masks.segment_mask)(segments, segments)
    assert matrices(mask, 4)[0][:3] == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    causal = jax.jit(masks.decoder_packed_mask)(segments)
    assert matrices(causal, 4)[0][:3] == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]]


def test_a_packed_decoder_row_attends_to_the_input_of_its_example():
    mask = masks.segment_mask(jnp.array([[1, 2, 2, 0]]), jnp.array([[1, 1, 2]]))
    assert matrices(mask, 4)[0][:3] == [[1, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_real_tokens_come_first():
    real = jax.jit(masks.real_tokens, static_argnums=1)(jnp.array([0, 2, 3]), 3)
    np.testing.assert_array_equal(real, [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
