"""Token, position and segment embeddings, against sums of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from prompt_tuning.core.errors import InputError
from prompt_tuning.models.parallel_embedding import ParallelEmbedding

V, D = 6, 4
TOKENS = np.array([[5, 0, 3], [2, 2, 4]])
SEGMENTS = np.array([[0, 0, 1], [0, 1, 1]])


def arrays_of(module):
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


def scattered(gradient, ids, rows):
    """Sums the gradients of equal ids."""
    table = np.zeros((rows, D), np.float32)
    np.add.at(table, ids, gradient)
    return table


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_and_gradients_on_two_devices_are_those_of_numpy(check_vma):
    module = ParallelEmbedding(jax.random.key(0), (V, D), positions=5, segments=2)
    graph, arrays = arrays_of(module)
    specs, whole = module.specs(), PartitionSpec()
    gradient = np.random.default_rng(0).normal(size=(2, 3, D)).astype("f4")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array(jax.devices()[:2]), ("tensor",)),
        in_specs=(specs, whole),
        out_specs=(whole, specs),
        check_vma=check_vma,
    )
    def run(arrays, gradient):
        def embed(arrays):
            module = nnx.merge(graph, nnx.State(arrays))
            return module(jnp.asarray(TOKENS), segments=jnp.asarray(SEGMENTS))

        y, pull_back = jax.vjp(embed, arrays)
        return y, pull_back(gradient)[0]

    y, gradients = run(arrays, gradient)
    token, position, segment = (
        np.asarray(arrays[name]) for name in ("token", "position", "segment")
    )
    expected = token[TOKENS] + position[:3] + segment[SEGMENTS]
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    numbers = np.broadcast_to(np.arange(3), TOKENS.shape)
    tables = {"token": (TOKENS, V), "position": (numbers, 5), "segment": (SEGMENTS, 2)}
    for name, (ids, rows) in tables.items():
        summed = scattered(gradient, ids, rows)
        np.testing.assert_allclose(gradients[name], summed, rtol=1e-5, atol=1e-6)
    # Each device has half of the tokens.
    assert gradients["token"].addressable_shards[0].data.size == V * D // 2


def test_a_single_device_and_a_model_without_segments():
    module = ParallelEmbedding(jax.random.key(0), (V, D), axis=None)
    assert list(module.specs()) == ["token"]
    token = np.asarray(module.token[...])
    np.testing.assert_array_equal(module(jnp.asarray(TOKENS)), token[TOKENS])
    with pytest.raises(InputError, match="segments are given, but the embedding has 0"):
        module(jnp.asarray(TOKENS), segments=jnp.asarray(SEGMENTS))
