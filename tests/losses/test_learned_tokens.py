"""Which tokens move the model: d loss / d logits of the published worked examples.

The examples, and the four cases of token types, are from SambaFlow's page
"Backpropagation best practices".
"""

import dataclasses
import functools
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.training.gradients import gradients
from tests.support import dummies
from tests.support.example_tables import load_for
from tests.support.exhaustive import sample

PAD = 69
CONFIG = dataclasses.replace(dummies.LLAMA, vocabulary_size=70)
PROMPT = "decoder/prompt/prompt"
SHORT = [9, 5, 6, 10, 7, 8, 2]
PADDED = [*SHORT, PAD, PAD, PAD, PAD]
FIRST = [0, 0, 0, 1, 1, 1, 3]
SECOND = [1, 1, 0, 0, 1, 1, 3]


def read(path, input_ids, types=None, **choices):
    """Reads a batch of one row as a run does."""
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.array([input_ids], np.int32)
        if types is not None:
            file["token_type_ids"] = np.array([types], np.int32)
    examples = load_for(
        path,
        architecture="decoder_only",
        tokenizer=None,
        vocabulary_size=CONFIG.vocabulary_size,
        **choices,
    )
    length = int(examples.input_lengths[0])
    room = int(examples.weight_counts[0])
    planned = PlannedBatch(np.array([0]), length, length, room, True)
    return jax.tree.map(jnp.asarray, build_batch(examples, planned, PAD))


def slopes(batch):
    """Returns d loss / d logits and probabilities `[T, V]` at every token.

    The gradient continues through the model to the prompt, where it is the step's.
    """
    graph, parameters = dummies.prompted(CONFIG)
    trained, frozen = parameter_groups.partition(parameters, {PROMPT: 0})
    length = batch.tokens.shape[1]
    everywhere = dataclasses.replace(
        batch, loss_positions=jnp.arange(length, dtype=jnp.int32)[None]
    )

    def logits_of(trained):
        model: Any = merge(graph, trained | frozen)
        return model.logits(model.hidden(everywhere))

    def loss(logits):
        picked = jnp.take_along_axis(logits, batch.loss_positions[..., None], axis=1)
        sums = NATS_PER_WEIGHT.sums(picked, jnp.eye(CONFIG.vocabulary_size), batch)
        return sums.loss / NATS_PER_WEIGHT.divisor(batch)

    @jax.jit
    def both(trained):
        logits, pull_back = jax.vjp(logits_of, trained)
        slope = jax.grad(loss)(logits)
        return slope[0], jax.nn.softmax(logits)[0], pull_back(slope)[0]

    slope, predicted, through = both(trained)
    compute = jax.jit(functools.partial(gradients, graph))
    step, _ = compute(trained, frozen, batch, None)
    np.testing.assert_allclose(through[PROMPT], step[PROMPT], atol=1e-6)
    return np.array(slope), np.array(predicted)


def assert_learned(batch, weights):
    """Checks that each token is learned exactly by its weight."""
    slope, predicted = slopes(batch)
    wanted = predicted - np.eye(CONFIG.vocabulary_size)[np.array(batch.tokens[0])]
    weights = np.array(weights)[:, None] / np.sum(weights)
    np.testing.assert_allclose(slope, weights * wanted, atol=1e-6)
    moved = np.abs(slope).max(axis=1)
    np.testing.assert_array_equal(moved > 0, weights[:, 0] > 0)
    return [int(t) for t in np.array(batch.tokens[0])[moved > 0]]


@pytest.mark.parametrize(
    ("input_ids", "types", "learned"),
    sample(
        1,
        [
            (SHORT, FIRST, [10, 7, 8, 2]),
            (SHORT, SECOND, [9, 5, 7, 8, 2]),
            (PADDED, [*FIRST, 2, 2, 2, 2], [10, 7, 8, 2]),
        ],
    ),
)
def test_published_examples_move_the_documented_tokens(
    tmp_path, input_ids, types, learned
):
    batch = read(
        tmp_path / "a.hdf5",
        input_ids,
        types,
        use_token_type_ids=True,
        prompt_loss_weight=0.0,
    )
    real = [t for t in types if t != 2]
    assert assert_learned(batch, [float(t in (1, 3)) for t in real]) == learned


@pytest.mark.parametrize("weight", sample(1, [0.1, 1.0]))
def test_prompt_tokens_move_in_proportion_to_their_weight(tmp_path, weight):
    batch = read(
        tmp_path / "a.hdf5",
        SHORT,
        FIRST,
        use_token_type_ids=True,
        prompt_loss_weight=weight,
    )
    weights = [weight if t == 0 else 1.0 for t in FIRST]
    assert assert_learned(batch, weights) == SHORT


@pytest.mark.slow
def test_unrequested_types_change_nothing(tmp_path):
    """Cases 1 and 2: without `use_token_type_ids` every token is learned."""
    bare = read(tmp_path / "a.hdf5", SHORT, use_token_type_ids=False)
    typed = read(
        tmp_path / "b.hdf5",
        SHORT,
        FIRST,
        use_token_type_ids=False,
        prompt_loss_weight=0.0,
    )
    for batch in (bare, typed):
        assert assert_learned(batch, [1.0] * 7) == SHORT


@pytest.mark.slow
def test_padding_is_learned_without_the_flag(tmp_path):
    """Case 2 to the letter: all tokens, regardless of their types."""
    types = [*FIRST, 2, 2, 2, 2]
    batch = read(tmp_path / "a.hdf5", PADDED, types, use_token_type_ids=False)
    assert assert_learned(batch, [1.0] * 11) == PADDED


def test_without_options_types_are_used_where_they_exist(tmp_path):
    """Case 1 as published; case 2 differs on purpose: types in the data are used."""
    bare = read(tmp_path / "a.hdf5", SHORT)
    assert bare.tokens[0][bare.loss_positions[0]].tolist() == SHORT
    assert bare.loss_weights[0].tolist() == [1.0] * 7
    typed = read(tmp_path / "b.hdf5", SHORT, FIRST)
    assert typed.tokens[0][typed.loss_positions[0]].tolist() == [10, 7, 8, 2]
    with pytest.raises(InputError, match=r"row 0: prompt_loss_weight is 0\.1, but the"):
        read(tmp_path / "c.hdf5", SHORT, prompt_loss_weight=0.1)


def test_requested_types_must_exist(tmp_path):
    """Case 3."""
    with pytest.raises(InputError, match=r"row 0: use_token_type_ids is set, but"):
        read(tmp_path / "a.hdf5", SHORT, use_token_type_ids=True)


def test_the_first_token_is_not_predicted_without_a_prompt(tmp_path):
    batch = read(
        tmp_path / "a.hdf5",
        SHORT,
        SECOND,
        use_token_type_ids=True,
        predicts_first_token=False,
    )
    assert batch.tokens[0][batch.loss_positions[0]].tolist() == [5, 7, 8, 2]


@pytest.mark.slow
def test_loss_weights_scale_the_updates_of_tokens(tmp_path):
    path = tmp_path / "a.hdf5"
    read(path, SHORT, FIRST)
    factors = np.array([[1, 1, 1, 0.25, 0, 2, 1]], np.float32)
    with h5py.File(path, "a") as file:
        file["loss_weights"] = factors
    examples = load_for(
        path, architecture="decoder_only", tokenizer=None, vocabulary_size=70
    )
    planned = PlannedBatch(np.array([0]), 7, 7, 3, True)
    batch = jax.tree.map(jnp.asarray, build_batch(examples, planned, PAD))
    assert assert_learned(batch, [0, 0, 0, 0.25, 0, 2, 1]) == [10, 8, 2]
