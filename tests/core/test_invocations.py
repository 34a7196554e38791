import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.adapted_rows import NEVER, first_active, invoked_positions


def test_an_adapter_acts_from_its_last_invocation_on():
    tokens = [
        [1, 2, 3, 1, 2, 4, 0, 0],  # twice
        [3, 2, 1, 4, 1, 3, 2, 2],  # never whole
        [2, 1, 2, 4, 3, 1, 2, 1],  # packed: in both examples
        [4, 4, 3, 1, 2, 4, 4, 4],  # packed: across their border only
    ]
    segments = [
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 2, 2, 2, 2],
        [1, 1, 1, 1, 2, 2, 2, 2],
    ]
    marks = invoked_positions(jnp.array(tokens), jnp.array(segments), (1, 2))
    expected = [
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(marks, np.array(expected, bool))
    assert [first_active(row, (1, 2)) for row in tokens[:2]] == [3, NEVER]
    assert first_active(tokens[1], ()) == 0
