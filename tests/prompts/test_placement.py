import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.prompts import placement

PROMPT = jnp.array([[-1.0], [-2.0]])
# Rows as google-research/prompt-tuning tests them: 1 is EOS, 0 padding. Vectors of one
# number, that of the token, show where each of them went.
ROWS = jnp.array([[7, 8, 9, 1, 0], [5, 1, 0, 0, 0]])
LENGTHS = jnp.array([4, 2])


@jax.jit
def joined(at):
    text = ROWS[..., None].astype(jnp.float32)
    return placement.join(PROMPT[None], text, at, len(PROMPT))[..., 0].astype(int)


@pytest.mark.parametrize(
    ("name", "ends_with_eos", "expected"),
    [
        ("prefix", True, [[-1, -2, 7, 8, 9, 1, 0], [-1, -2, 5, 1, 0, 0, 0]]),
        ("after_bos", True, [[7, -1, -2, 8, 9, 1, 0], [5, -1, -2, 1, 0, 0, 0]]),
        ("suffix", True, [[7, 8, 9, -1, -2, 1, 0], [5, -1, -2, 1, 0, 0, 0]]),
        ("suffix_after_eos", True, [[7, 8, 9, 1, -1, -2, 0], [5, 1, -1, -2, 0, 0, 0]]),
        ("suffix", False, [[7, 8, 9, 1, -1, -2, 0], [5, 1, -1, -2, 0, 0, 0]]),
        ("suffix_after_eos", False, [[7, 8, 9, 1, -1, -2, 0], [5, 1, -1, -2, 0, 0, 0]]),
    ],
)
def test_a_prompt_stands_where_the_placement_says(name, ends_with_eos, expected):
    at = placement.PLACEMENTS[name](LENGTHS, ends_with_eos)
    np.testing.assert_array_equal(joined(at), expected)


@pytest.mark.parametrize("name", placement.PLACEMENTS)
def test_in_an_empty_row_the_prompt_stands_first(name):
    at = placement.PLACEMENTS[name](jnp.array([0, 0]), True)
    expected = jnp.concatenate([jnp.array([[-1, -2]] * 2), ROWS], axis=1)
    np.testing.assert_array_equal(joined(at), expected)


def test_put_first_is_join_at_zero():
    text = ROWS[..., None].astype(jnp.float32)
    first = jax.jit(placement.put_first)(PROMPT[None], text)[..., 0]
    np.testing.assert_array_equal(first, joined(jnp.array([0, 0])))


def test_a_prompt_takes_the_type_of_the_text():
    text = jnp.ones((2, 3, 1), jnp.bfloat16)
    assert jax.jit(placement.put_first)(PROMPT[None], text).dtype == jnp.bfloat16
    at = jnp.array([1, 2])
    assert jax.jit(placement.join)(PROMPT[None], text, at, 2).dtype == jnp.bfloat16


@pytest.mark.parametrize("at", [[0, 0], [1, 2], [5, 5], [3, 0]])
def test_joined_position_finds_each_token_again(at):
    at, rows = jnp.array(at), joined(jnp.array(at))
    places = jnp.broadcast_to(jnp.arange(5), (2, 5))
    moved = jax.jit(placement.joined_position, static_argnums=2)(places, at, 2)
    np.testing.assert_array_equal(jnp.take_along_axis(rows, moved, axis=1), ROWS)
