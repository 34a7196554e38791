import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.prompts import placement

PROMPT = jnp.array([[-1.0], [-2.0]])
# Rows from the tests of google-research/prompt-tuning: 1 is EOS, 0 padding. Vectors
# with the token as their only number show the position of each token.
ROWS = jnp.array([[7, 8, 9, 1, 0], [5, 1, 0, 0, 0]])
LENGTHS = jnp.array([4, 2])


@jax.jit
def joined(at):
    return insert(ROWS, (ROWS > 0).astype(int), at[:, None])


def insert(rows, segments, at, count=2):
    layout = placement.lay_out(at, segments, count, len(PROMPT))
    text = rows[..., None].astype(jnp.float32)
    vectors = jnp.tile(PROMPT[None], (1, at.shape[1], 1))
    return placement.join(vectors, text, layout)[..., 0].astype(int)


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
def test_the_placement_sets_the_position_of_the_prompt(name, ends_with_eos, expected):
    place = jax.jit(placement.PLACEMENTS[name], static_argnames="ends_with_eos")
    at = place(LENGTHS, ends_with_eos=ends_with_eos)
    np.testing.assert_array_equal(joined(at), expected)


@pytest.mark.parametrize("name", placement.PLACEMENTS)
def test_the_prompt_comes_first_in_an_empty_row(name):
    at = placement.PLACEMENTS[name](jnp.array([0, 0]), True)
    expected = jnp.concatenate([jnp.array([[-1, -2]] * 2), ROWS], axis=1)
    np.testing.assert_array_equal(joined(at), expected)


def test_prepending_equals_joining_at_zero():
    text = ROWS[..., None].astype(jnp.float32)
    first = jax.jit(placement.put_first)(PROMPT[None], text)[..., 0]
    np.testing.assert_array_equal(first, joined(jnp.array([0, 0])))


def test_a_prompt_is_cast_to_the_type_of_the_text():
    text = jnp.ones((2, 3, 1), jnp.bfloat16)
    assert jax.jit(placement.put_first)(PROMPT[None], text).dtype == jnp.bfloat16
    at = jnp.array([1, 2])
    layout = placement.lay_out(at[:, None], jnp.ones((2, 3), int), 2, 2)
    assert jax.jit(placement.join)(PROMPT[None], text, layout).dtype == jnp.bfloat16


@pytest.mark.parametrize("at", [[0, 0], [1, 2], [5, 5], [3, 0]])
def test_joined_positions_locate_each_token(at):
    at, rows = jnp.array(at), joined(jnp.array(at))
    indices = jnp.broadcast_to(jnp.arange(5), (2, 5))
    moved = jax.jit(placement.joined_position, static_argnums=2)(
        indices, at[:, None], 2
    )
    np.testing.assert_array_equal(jnp.take_along_axis(rows, moved, axis=1), ROWS)


def test_each_example_of_a_packed_row_has_its_prompt():
    rows = jnp.array([[7, 8, 5, 6, 4, 0], [9, 9, 9, 3, 0, 0]])
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]])
    # The first example's prompt precedes its second token, and the second's comes
    # first; the other row has one example.
    at = jnp.array([[1, 2], [1, 6]])
    expected = [[7, -1, -2, 8, -1, -2, 5, 6, 4, 0], [9, -1, -2, 9, 9, 3, 0, 0, -1, -2]]
    np.testing.assert_array_equal(jax.jit(insert)(rows, segments, at), expected)
    layout = placement.lay_out(at, segments, 2, 2)
    np.testing.assert_array_equal(
        layout.segments, [[1, 1, 1, 1, 2, 2, 2, 2, 2, 0], [1] * 6 + [0] * 4]
    )
    is_prompt = [[0, 1, 1, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(layout.is_prompt.astype(int), is_prompt)


def test_the_padding_of_a_prompt_moves_to_the_end():
    result = jax.jit(insert)(ROWS, (ROWS > 0).astype(int), jnp.array([[1], [0]]), 1)
    expected = [[7, -1, 8, 9, 1, 0, -2], [-1, 5, 1, 0, 0, 0, -2]]
    np.testing.assert_array_equal(result, expected)


def test_a_template_inserts_the_vectors_into_the_row():
    soft = jnp.array([[-9, 0, -9, 1, -9]])
    layout = placement.lay_out_template(soft, jnp.array([[1, 1, 1, 1, 0]]), 2, 1)
    text = jnp.array([[7.0, 100, 8, 101, 0]])[..., None]
    joined = placement.join(PROMPT[None], text, layout)[..., 0]
    np.testing.assert_array_equal(joined, [[7, -1, 8, -2, 0]])
