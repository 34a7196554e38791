"""Projections divided by column and by row, against products of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from prompt_tuning.models.parallel_projections import ColumnParallel, RowParallel

IN, OUT, ROWS = 4, 8, 3


def mesh(count=2):
    return Mesh(np.array(jax.devices()[:count]), ("tensor",))


def arrays_of(module):
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state)


WHOLE, SHARDED = PartitionSpec(), PartitionSpec(None, "tensor")
# The module, and how its input and its output are divided.
KINDS = {
    "gather": (ColumnParallel, {"gather_output": True}, WHOLE, WHOLE),
    "keep": (ColumnParallel, {"gather_output": False}, WHOLE, SHARDED),
    "cut": (RowParallel, {"input_is_parallel": False}, WHOLE, WHOLE),
    "given": (RowParallel, {"input_is_parallel": True}, SHARDED, WHOLE),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_products_and_gradients_are_those_of_numpy(inside, check_vma, count):
    modules = {
        name: kind(jax.random.key(0), (IN, OUT), **options)
        for name, (kind, options, _, _) in KINDS.items()
    }
    for module in modules.values():
        module.bias[...] = jnp.arange(OUT, dtype=jnp.float32)
    graphs = {name: nnx.split(module)[0] for name, module in modules.items()}
    arrays = {name: arrays_of(module)[1] for name, module in modules.items()}
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, IN)).astype("f4")
    gradient = random.normal(size=(ROWS, OUT)).astype("f4")

    def apply(arrays, xs):
        return {n: nnx.merge(graphs[n], nnx.State(arrays[n]))(xs[n]) for n in xs}

    def differentiate(apply, arrays, xs, gradients):
        ys, pull_back = jax.vjp(apply, arrays, xs)
        return ys, *pull_back(gradients)

    specs = {name: module.specs() for name, module in modules.items()}
    x_specs = {name: kind[2] for name, kind in KINDS.items()}
    y_specs = {name: kind[3] for name, kind in KINDS.items()}
    on_mesh = functools.partial(jax.shard_map, mesh=mesh(count), check_vma=check_vma)
    if inside:
        run = on_mesh(
            functools.partial(differentiate, apply),
            in_specs=(specs, x_specs, y_specs),
            out_specs=(y_specs, specs, x_specs),
        )
    else:
        mapped = on_mesh(apply, in_specs=(specs, x_specs), out_specs=y_specs)
        run = functools.partial(differentiate, mapped)
    found = jax.jit(run)(
        arrays, dict.fromkeys(KINDS, x), dict.fromkeys(KINDS, gradient)
    )
    for name in KINDS:
        y, gradients, x_gradient = (each[name] for each in found)
        kernel, bias = np.asarray(arrays[name]["kernel"]), np.arange(OUT)
        for actual, value in [
            (y, x @ kernel + bias),
            (gradients["kernel"], x.T @ gradient),
            (gradients["bias"], gradient.sum(0)),
            (x_gradient, gradient @ kernel.T),
        ]:
            np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-5)
        # Each device has its share of the kernel.
        shard = gradients["kernel"].addressable_shards[0].data
        assert shard.size == IN * OUT // count


@pytest.mark.slow
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
