"""Prompts in every family: however a batch is executed, the numbers are the same."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.models.scoring import label_nll
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.streamed_step import StreamedGradient
from prompt_tuning.training.sweep_step import compile_sweep_step
from tests.core.test_quantization import in_store, quantized
from tests.models.test_label_states import (
    LABELS,
    joined_batch,
    label_batch,
    loss_of_rows,
)
from tests.streaming.test_streamed_step import Layers, divided
from tests.support import dummies
from tests.support.exhaustive import sample

FOLDER = Path(
    os.environ.get("FAMILY_FIXTURES", Path(__file__).parents[1] / "fixtures/families")
)
# Windows, two rotary bases, norms of queries and keys; a relative bias in each block.
FIRST = ("gemma3_text", "umt5")
FAMILIES = [*FIRST, *sorted({path.name for path in FOLDER.iterdir()} - {*FIRST})]
# Rows of which some are longer than the windows of four positions.
SIZES = [(4, 3), (2, 9), (7, 1), (1, 2), (5, 4)]
PACKED = np.array([[0, 1, -1], [2, 3, 4]])
# Models whose layers are not all alike, which cannot be read layer by layer.
MIXED = (
    "bamba",
    "deepseek_v3",
    "deepseek_v3_plain",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "granitemoehybrid",
    "granitemoehybrid_dense",
    "lfm2",
    "lfm2_moe",
    "llama4",
    "llama4_text",
    "nemotron_h",
    "nemotron_h_dense",
    "olmo_hybrid",
    "qwen2_moe_dense",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen3_vl_moe",
)
# Models with experts, of which other tests quantize the weights.
EXPERTS = [
    name
    for name in FAMILIES
    if "experts" in (FOLDER / name / "base/config.json").read_text()
]
# A prompt that sees no text, which an encoder's does by default.
BEFORE_TEXT = Prompting(visibility=("prompt->prompt",))


def families_of(test, without=()):
    """Returns the families of a test: the first, and a sixth of the others.

    Each family is in one or two of the tests; its layers are in other families, too.
    """
    first, *others = FAMILIES
    chosen = [name for name in others[test % 6 :: 6] if name not in without]
    return sample(1, [first, *chosen])


@functools.cache
def config_of(family):
    return read_config(FOLDER / family / "base")


@functools.cache
def weights_of(family):
    source = Pretrained(checkpoint=str(FOLDER / family / "base"))
    return open_pretrained(source, key=jax.random.key(0)).read_parameters()


def model_of(family, prompting=None, **choices):
    """Returns the graph, the prompt, and the weights of the fixture."""
    config = dataclasses.replace(config_of(family), **choices)
    graph, parameters = dummies.prompted(config, prompting=prompting)
    trained = {path: x for path, x in parameters.items() if "/prompt/" in path}
    return graph, trained, weights_of(family)


@functools.cache
def examples(family):
    config = config_of(family)
    rows = dummies.random_rows(SIZES, vocabulary_size=config.vocabulary_size)
    result = []
    for given, completion in rows:
        if config.architecture == "encoder_decoder":
            inputs, targets, first = given, completion, 0
        else:
            inputs = targets = given + completion
            first = len(given)
        weights = (np.arange(len(targets)) >= first).astype(np.float32)
        arrays = np.array(inputs, np.int32), np.array(targets, np.int32)
        result.append(Example(*arrays, weights, first, 0))
    return result


def batch_of(family, rows):
    decoder_only = config_of(family).architecture == "decoder_only"
    planned = PlannedBatch(np.asarray(rows), 21, 21, 14, same_tokens=decoder_only)
    return build_batch(examples(family), planned, 0)


ALL = np.arange(len(SIZES))
compute = jax.jit(gradients, static_argnums=0)


@functools.cache
def expected(family):
    """Gradient and loss of all rows, with the prompt inserted into each of them."""
    prompting = Prompting(execution="joined")
    return compute(*model_of(family, prompting), batch_of(family, ALL), None)


def assert_same(actual, wanted, tolerance=1e-5):
    (gradient, sums), (usual, usual_sums) = actual, wanted
    assert sums.weight == usual_sums.weight
    np.testing.assert_allclose(sums.loss, usual_sums.loss, rtol=1e-5)
    for path, leaf in usual.items():
        largest = np.abs(leaf).max()
        assert largest > 1e-4
        np.testing.assert_allclose(
            gradient[path], leaf, atol=tolerance * max(1.0, largest)
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", families_of(0))
def test_labels_cost_the_training_loss_of_text_and_label(family):
    config, (graph, trained, weights) = config_of(family), model_of(family)
    parameters = {**weights, **trained}
    size = config.vocabulary_size
    given = [row for row, _ in dummies.random_rows(SIZES, vocabulary_size=size)]
    batch = joined_batch(config, given)
    expected = loss_of_rows(graph, parameters, batch, len(LABELS))
    score = jax.jit(functools.partial(label_nll, graph))
    actual = score(parameters, label_batch(given))
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", families_of(1))
def test_each_row_alone_left_in_a_batch_and_packed_has_the_same_loss(family):
    model = model_of(family)
    ragged = compute(*model, batch_of(family, ALL), None)
    assert_same(ragged, expected(family))
    assert_same(compute(*model, batch_of(family, PACKED), None), expected(family))
    alone = [compute(*model, batch_of(family, [row]), None)[1].loss for row in ALL]
    np.testing.assert_allclose(sum(alone), expected(family)[1].loss, rtol=1e-5)


JOINED = [name for name in FAMILIES if config_of(name).positions == "disentangled"]
"""Families whose prompts need the positions of the row's tokens beside them."""


def test_a_prompt_that_needs_the_rows_positions_does_not_run_once():
    once = dataclasses.replace(BEFORE_TEXT, execution="shared")
    for family in JOINED:
        with pytest.raises(InputError, match="'shared', but queries see distances"):
            model_of(family, once)


@pytest.mark.parametrize("family", families_of(2, without=JOINED))
def test_a_prompt_that_runs_once_for_the_batch_gives_the_same_gradient(family):
    config = config_of(family)
    causal = config.architecture == "decoder_only" and not config.bidirectional
    shared = Prompting() if causal else BEFORE_TEXT
    joined = dataclasses.replace(shared, execution="joined")
    batch = batch_of(family, ALL)
    outcomes = [
        compute(*model_of(family, dataclasses.replace(prompting)), batch, None)
        for prompting in (dataclasses.replace(shared, execution="shared"), joined)
    ]
    assert_same(*outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("family", families_of(3))
def test_logits_at_gathered_positions_are_those_of_all_positions(family):
    graph, trained, frozen = model_of(family)
    batch = batch_of(family, ALL)
    count = np.asarray(batch.targets).shape[1]
    everywhere = dataclasses.replace(
        batch,
        loss_positions=np.tile(np.arange(count, dtype=np.int32), (len(ALL), 1)),
        loss_weights=np.ones((len(ALL), count), np.float32),
    )
    whole = dummies.logits(trained | frozen, everywhere, graph=graph)
    some = dummies.logits(trained | frozen, batch, graph=graph)
    gathered = np.take_along_axis(whole, batch.loss_positions[..., None], 1)
    real = batch.loss_weights > 0
    np.testing.assert_allclose(some[real], gathered[real], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", families_of(4))
def test_rematerialization_changes_no_number(family):
    policy = Rematerialization(policy="nothing")
    model = model_of(family, rematerialization=policy)
    assert_same(compute(*model, batch_of(family, ALL), None), expected(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", families_of(5, MIXED))
def test_weights_that_are_read_layer_by_layer_give_the_same_gradient(family):
    graph, trained, frozen = model_of(family)
    trained, _, blocks, rest = divided(trained | frozen, list(trained))
    layers = Layers(blocks)
    streamed = StreamedGradient(graph, layers.weights)
    actual = streamed(trained, rest, batch_of(family, ALL), None)
    assert_same(actual, expected(family))
    assert len(set(layers.reads)) == sum(len(leaf) for leaf in blocks.values())


@pytest.mark.slow
@pytest.mark.parametrize("store", sample(1, ["nf4", "int4", "int8"]))
@pytest.mark.parametrize("family", families_of(6, EXPERTS))
def test_quantized_weights_are_computed_with_as_what_they_stand_for(family, store):
    graph, trained, frozen = model_of(family)
    narrow = dummies.prompted(in_store(config_of(family), store))[0]
    held, meant = quantized(frozen, store)
    batch = batch_of(family, ALL)
    outcomes = [
        compute(structure, trained, weights, batch, None)
        for structure, weights in ((narrow, held), (graph, meant))
    ]
    assert_same(*outcomes, tolerance=5e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", families_of(7))
def test_members_of_a_sweep_take_the_steps_of_separate_runs(family):
    graph, trained, frozen = model_of(family)
    batch, optimizer = batch_of(family, ALL), optax.sgd(0.1)
    starts: list[Any] = [
        TrainState.create(
            {path: factor * leaf for path, leaf in trained.items()},
            optimizer,
            jax.random.key(0),
        )
        for factor in (1.0, 0.5)
    ]
    copies = jax.tree.map(jnp.copy, starts)
    together = compile_sweep_step(
        graph, [optimizer] * 2, own_batches=False, dropout=False
    )
    states, _ = together(tuple(copies), frozen, batch)
    single = compile_step(graph, optimizer, dropout=False)
    for state, start in zip(states, starts, strict=True):
        alone, _ = single(start, frozen, batch)
        for path, leaf in alone.trained.items():
            np.testing.assert_allclose(state.trained[path], leaf, atol=1e-5)
