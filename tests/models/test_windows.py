"""A prompt in layers with a window of attention."""

import dataclasses

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.prompt_settings import Prompting
from tests.support import dummies

WINDOWED = dataclasses.replace(dummies.LLAMA, window=4, windowed_layers=(0, 1))


def sensitivity(prompting):
    """Returns the gradient of the logits of a token far from the prompt."""
    graph, parameters = dummies.prompted(WINDOWED, prompting=prompting)
    batch = dummies.make_batch(WINDOWED, dummies.random_rows([(11, 1)]))

    def score(prompt):
        values = parameters | {"decoder/prompt/prompt": prompt}
        return dummies.logits(values, batch, graph=graph)[0, -1, 0]

    return np.asarray(jax.grad(score)(parameters["decoder/prompt/prompt"]))


def test_a_prompt_leaves_the_window_unless_it_is_kept_in_sight():
    # Two layers reach back 2 * (4 - 1) positions, fewer than the 11 given tokens.
    assert not sensitivity(Prompting()).any()
    assert not sensitivity(Prompting(execution="joined")).any()
    assert (np.abs(sensitivity(Prompting(beyond_window=True))) > 1e-6).any()


@pytest.mark.parametrize(
    ("config", "prompting"),
    [
        (dummies.LLAMA, Prompting(beyond_window=True)),
        (WINDOWED, Prompting(beyond_window=True, execution="joined")),
        (WINDOWED, Prompting(beyond_window=True, placement="suffix")),
    ],
)
def test_a_prompt_that_cannot_stay_in_sight_is_refused(config, prompting):
    with pytest.raises(InputError, match="beyond_window"):
        dummies.prompted(config, prompting=prompting)
