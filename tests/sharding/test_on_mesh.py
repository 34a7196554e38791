"""Evaluation, generation and dropout on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.decoding.batch_decoding import continue_batch
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import first_choices, sampling_needs
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.evaluation.batch_scores import score_rows
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.prompts.soft import StackedPrompts
from prompt_tuning.settings.mesh_shape import MeshShape
from tests.support import dummies, meshes
from tests.support.exhaustive import sample

GIVEN = [(1, 2, 3), (4,), (5, 6), (7, 8, 9, 10)]
TEMPERATURES = {"greedy": 0, "sampled": 1.5}


def on_mesh(family: str):
    """A model on one device, and on a mesh that shards every dimension it can."""
    config = (dummies.FAMILIES | {"deepseek": dummies.DEEPSEEK})[family]
    graph, parameters = dummies.prompted(config)
    shape = MeshShape(data=1, fsdp=2, tensor=4)
    layout = meshes.layout_of(shape, config)
    placement = meshes.placed(layout, graph, parameters)
    put = {path: placement.put(path, leaf) for path, leaf in parameters.items()}
    return graph, [(parameters, None), (put, layout)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampled", sample(1, TEMPERATURES))
@pytest.mark.parametrize("family", ["llama", "t5_gated", "deepseek"])
def test_sharded_rows_continue_the_same(family, sampled):
    graph, placed = on_mesh(family)
    tokens, lengths = pad_rows(GIVEN, 0, 4)
    sampling = Sampling(temperature=TEMPERATURES[sampled])
    # Some rows end before others, on different devices.
    choices = first_choices(sampling, (11,), range(len(GIVEN)))
    one, many = (
        continue_batch(
            parameters,
            tokens,
            lengths,
            choices,
            graph=graph,
            new_tokens=6,
            needs=sampling_needs(sampling),
            pad_id=0,
            layout=layout,
        )
        for parameters, layout in placed
    )
    assert one.tolist() == many.tolist()


def test_tokens_have_the_same_loss():
    graph, placed = on_mesh("gpt2")
    batch = dummies.make_batch(dummies.GPT2, dummies.random_rows(meshes.ROWS))
    one, many = (
        score_rows(token_losses, graph, layout, parameters, batch)
        for parameters, layout in placed
    )
    np.testing.assert_allclose(one.nll, many.nll, rtol=1e-5)
    np.testing.assert_array_equal(one.correct, many.correct)


@pytest.mark.parametrize("store", sample(1, ["nf4", "int4", "int8"]))
def test_packed_kernels_are_divided_by_groups(store):
    """Each device has two of four groups of 64 inputs, and all tables of values."""
    config = dataclasses.replace(
        dummies.LLAMA, width=256, feed_forward_width=256, head_width=64
    )
    config = dataclasses.replace(config, parameter_dtype=store, quantized_tables=True)
    graph, parameters = dummies.prompted(config)
    layout = meshes.layout_of(MeshShape(data=1, fsdp=2, tensor=2), config)
    placement = meshes.placed(layout, graph, parameters)
    put = {path: placement.put(path, leaf) for path, leaf in parameters.items()}
    batch = dummies.make_batch(config, dummies.random_rows(meshes.ROWS))
    one, many = (
        score_rows(token_losses, graph, on, held, batch)
        for held, on in ((parameters, None), (put, layout))
    )
    np.testing.assert_allclose(one.nll, many.nll, rtol=1e-5)


def test_rows_grouped_by_prompt_are_not_divided():
    config = dummies.LLAMA
    prompts = StackedPrompts(jnp.arange(2.0 * 3 * 16).reshape(2, 3, 16))
    graph, parameters = dummies.with_prompt(config, prompts)
    layout = meshes.layout_of(MeshShape(data=2), config)
    batch = dummies.make_batch(config, dummies.random_rows(meshes.ROWS))
    with pytest.raises(ValueError, match="cannot be grouped by 2 prompts; set"):
        score_rows(token_losses, graph, layout, parameters, batch)


def test_dropout_depends_on_the_position_in_the_whole_batch():
    key, ones = jax.random.key(1), jnp.ones((6, 4, 8))
    whole = dropout(ones, 0.5, key, DropoutIndex.for_rows((6, 4, 8)))
    later = dropout(ones[:2], 0.5, key, DropoutIndex.for_rows((2, 4, 8), first=3))
    np.testing.assert_array_equal(whole[3:5], later)
    numbers = jnp.arange(24).reshape(6, 4)
    columns = DropoutIndex.at_positions(numbers, 3, first=5)
    actual = dropout(ones[:, :, 5:], 0.5, key, columns)
    np.testing.assert_array_equal(whole[:, :, 5:], actual)
    assert 0.4 < np.mean(np.asarray(whole) == 0) < 0.6


def test_an_indivisible_vocabulary_is_padded_and_sliced():
    graph, parameters = dummies.prompted(dummies.LLAMA)
    layout = meshes.layout_of(MeshShape(data=1, tensor=4), dummies.LLAMA)
    placement = meshes.placed(layout, graph, parameters)
    path = "token_embedder/embedding"
    put = placement.put(path, parameters[path])
    assert put.shape == (32, 16)
    assert not np.any(put[31:])
    np.testing.assert_array_equal(
        placement.replicate({path: put})[path], parameters[path]
    )
