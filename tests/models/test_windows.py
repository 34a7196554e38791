"""A prompt in layers with a window of attention."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.encoder_decoder import EncoderDecoder
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.settings.prompting import Prompting
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


@pytest.mark.exhaustive
def test_a_prompt_leaves_the_window_unless_it_is_kept_in_sight():
    # Two layers reach back 2 * (4 - 1) positions, fewer than the 11 given tokens.
    assert not sensitivity(Prompting()).any()
    assert not sensitivity(Prompting(execution="joined")).any()
    assert (np.abs(sensitivity(Prompting(beyond_window=True))) > 1e-6).any()


@pytest.mark.exhaustive
def test_windows_of_an_encoder_reach_to_both_sides():
    config = dataclasses.replace(
        dummies.T5_GATED, window=2, encoder_windowed_layers=(0, 1)
    )
    alone = Prompting(visibility=("prompt->prompt",))
    tokens = jnp.arange(1, 12)[None]

    def gradients(prompting, position):
        """Returns the gradients of an output by the prompt and by each token."""
        graph, parameters = dummies.prompted(config, prompting=prompting)
        path, table = "encoder/prompt/prompt", "token_embedder/embedding"
        rows = RowInfo(
            *jnp.array([[11], [0]]), vector_ids=tokens - config.vocabulary_size
        )

        def output(values):
            model = cast(EncoderDecoder, merge(graph, parameters | values))
            *_, text = model.encode(tokens, rows, by_block=True)
            assert not isinstance(text.key_values, KeyValues)
            return text.key_values[0, position, 0]

        given = {name: parameters[name] for name in (path, table)}
        gradient = jax.jit(jax.grad(output))(given)
        return gradient[path], np.abs(gradient[table][tokens[0]]).max(-1) > 0

    prompt, seen = gradients(alone, 5)
    # Two layers reach 2 * 2 positions.
    assert seen.tolist() == [abs(i - 5) <= 4 for i in range(11)] and not prompt[0].any()
    assert not gradients(alone, 10)[0].any()
    kept = dataclasses.replace(alone, beyond_window=True)
    assert (np.abs(gradients(kept, 10)[0]) > 1e-6).any()


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
