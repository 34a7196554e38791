import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning import masks


def matrices(mask, queries):
    """Each row's matrix, of zeros and ones."""
    rows, _, _, keys = mask.shape
    return np.broadcast_to(mask, (rows, 1, queries, keys))[:, 0].astype(int).tolist()


def test_an_encoders_real_tokens_and_prompt_see_each_other_and_no_padding():
    # One prompt vector, and 2 and 0 real tokens of at most 2.
    mask = jax.jit(masks.encoder_mask, static_argnums=1)(jnp.array([3, 1]), 3)
    assert matrices(mask, 3) == [
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]],
    ]


def test_a_causal_decoder_sees_itself_and_what_is_before():
    mask = jax.jit(masks.decoder_causal_mask, static_argnums=0)(4)
    assert matrices(mask, 4) == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    ]


def test_in_a_prefix_decoder_prompt_and_given_tokens_see_each_other_both_ways():
    # One prompt vector and 2, 0 or 3 given tokens, in rows of 4 positions.
    mask = jax.jit(masks.decoder_prefix_mask, static_argnums=1)(jnp.array([3, 1, 4]), 4)
    assert matrices(mask, 4) == [
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]],
    ]


def test_real_tokens_stand_first():
    real = jax.jit(masks.real_tokens, static_argnums=1)(jnp.array([0, 2, 3]), 3)
    np.testing.assert_array_equal(real, [[0, 0, 0], [1, 1, 0], [1, 1, 1]])
