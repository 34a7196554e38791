"""Projections divided by column and by row, against products of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning.models.parallel_projections import ColumnParallel, RowParallel

IN, OUT, ROWS = 4, 6, 3


def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("tensor",))


def arrays_of(module):
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


@pytest.mark.parametrize(
    ("kind", "options", "input_axes", "output_axes"),
    [
        (ColumnParallel, {"gather_output": True}, (), ()),
        (ColumnParallel, {"gather_output": False}, (), (None, "tensor")),
        (RowParallel, {"input_is_parallel": False}, (), ()),
        (RowParallel, {"input_is_parallel": True}, (None, "tensor"), ()),
    ],
)
def test_products_and_gradients_on_two_devices_are_those_of_numpy(
    kind, options, input_axes, output_axes
):
    module = kind(jax.random.key(0), (IN, OUT), **options)
    module.bias[...] = jnp.arange(OUT, dtype=jnp.float32)
    graph, arrays = arrays_of(module)
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, IN)).astype("f4")
    gradient = random.normal(size=(ROWS, OUT)).astype("f4")
    specs = module.specs()
    x_spec, y_spec = PartitionSpec(*input_axes), PartitionSpec(*output_axes)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(specs, x_spec, y_spec),
        out_specs=(y_spec, (specs, x_spec)),
        check_vma=False,
    )
    def run(arrays, x, gradient):
        y, pull_back = jax.vjp(
            lambda arrays, x: nnx.merge(graph, nnx.State(arrays))(x), arrays, x
        )
        return y, pull_back(gradient)

    y, (found, x_gradient) = run(arrays, x, gradient)
    kernel, bias = np.asarray(arrays["kernel"]), np.arange(OUT)
    expected = [x @ kernel + bias, x.T @ gradient, gradient.sum(0), gradient @ kernel.T]
    for actual, value in zip(
        [y, found["kernel"], found["bias"], x_gradient], expected, strict=True
    ):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-5)
    # Each device has half of the kernel.
    assert found["kernel"].addressable_shards[0].data.size == IN * OUT // 2


@pytest.mark.parametrize("kind", [ColumnParallel, RowParallel])
def test_shards_created_on_their_devices_are_cuts_of_the_whole(kind):
    def create_arrays(key):
        return arrays_of(kind(key, (IN, OUT)))[1]

    key = jax.random.key(3)
    whole = create_arrays(key)
    shardings = {
        name: NamedSharding(mesh(), spec)
        for name, spec in kind(key, (IN, OUT)).specs().items()
    }
    straight = jax.jit(create_arrays, out_shardings=shardings)(key)
    cut = jax.device_put(whole, shardings)
    for name, array in straight.items():
        assert array.sharding == cut[name].sharding
        for one, other in zip(
            array.addressable_shards, cut[name].addressable_shards, strict=True
        ):
            np.testing.assert_array_equal(one.data, other.data)
    assert np.asarray(straight["kernel"]).std() > 0.1
