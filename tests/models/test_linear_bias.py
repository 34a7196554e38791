"""Slopes and biases of ALiBi."""

import jax.numpy as jnp
import numpy as np

from prompt_tuning.models.relative_positions import linear_bias, slopes


def test_slopes_of_eight_heads_are_those_of_the_paper():
    np.testing.assert_allclose(slopes(8), 0.5 ** np.arange(1, 9))


def test_other_numbers_of_heads_take_slopes_of_the_next_power_of_two():
    # Four heads have 1/4, 1/16, 1/64, 1/256; eight have 1/2, 1/4, 1/8, ...
    np.testing.assert_allclose(
        slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    )


def test_the_bias_falls_with_the_distance():
    bias = linear_bias(jnp.array([[5]]), jnp.array([[5, 4, 1]]), heads=2)
    np.testing.assert_allclose(
        bias[0, :, 0], [[0, -1 / 16, -4 / 16], [0, -1 / 256, -4 / 256]]
    )
