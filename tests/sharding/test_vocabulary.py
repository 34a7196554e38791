"""The cross-entropy of a vocabulary that is sharded over devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from prompt_tuning.losses.cross_entropy import distillation_loss, token_loss
from prompt_tuning.losses.logit_losses import Divergence
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout
from scripts.bench import hlo
from tests.support import dummies, meshes

B, M, D, V = 4, 5, 16, dummies.V
MESHES = {
    "tensor 4": MeshShape(data=1, tensor=4),
    "fsdp 2, tensor 4": MeshShape(data=1, fsdp=2, tensor=4),
    "data 2, tensor 2": MeshShape(data=2, tensor=2),
}
TERMS = {
    "plain": {},
    "all": {"z_loss": 1e-2, "label_smoothing": 0.1, "soft_cap": 3.0},
}


def numbers(rows: int = B, vocabulary: int = V) -> tuple[jax.Array, ...]:
    """Hidden states, a head, targets, and weights."""
    random = np.random.default_rng(0)
    hidden = random.standard_normal((rows, M, D)).astype("f4")
    head = random.standard_normal((vocabulary, D)).astype("f4")
    targets = random.integers(0, vocabulary, (rows, M)).astype("i4")
    weights = random.random((rows, M)).astype("f4")
    return tuple(map(jnp.asarray, (hidden, head, targets, weights)))


def divided(layout: MeshLayout, function, *, gradients: int = 2):
    """Runs a scalar function of hidden states and head, with its gradients."""
    head = layout.spec("head/kernel", ("vocab", "embed"))
    specs = (layout.row_spec, head, layout.row_spec, layout.row_spec)

    def on_device(hidden, head, targets, weights):
        with collectives.use_layout(layout):
            actual, slopes = jax.value_and_grad(function, argnums=(0, 1)[:gradients])(
                hidden, head, targets, weights
            )
            if layout.row_axes:
                actual = jax.lax.psum(actual, layout.row_axes)
            data = tuple(axis for axis in layout.row_axes if axis == "data")
            if data and gradients == 2:
                slopes = (slopes[0], jax.lax.psum(slopes[1], data))
            return actual, slopes

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=layout.mesh,
            in_specs=specs,
            out_specs=(PartitionSpec(), specs[:gradients]),
            check_vma=False,
        )
    )


def padded(layout: MeshLayout, head):
    """Pads the head to a divisible number of rows."""
    rows = layout.padded_shape(("vocab", "embed"), head.shape)[0]
    return jnp.pad(head, [(0, rows - len(head)), (0, 0)])


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradients_equal_those_on_one_device(name, terms):
    hidden, head, targets, weights = numbers()

    def total(hidden, head, targets, weights):
        return jnp.sum(weights * token_loss(hidden, head, targets, **TERMS[terms]).nll)

    layout = meshes.layout_of(MESHES[name], dummies.LLAMA)
    assert padded(layout, head).shape[0] == 32
    run = divided(layout, total)
    actual, (d_hidden, d_head) = run(hidden, padded(layout, head), targets, weights)
    wanted = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    expected, (e_hidden, e_head) = wanted(hidden, head, targets, weights)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(d_hidden, e_hidden, atol=5e-6)
    np.testing.assert_allclose(d_head[:V], e_head, atol=5e-6)
    assert not np.any(d_head[V:])


def test_the_sharded_loss_equals_optaxs():
    hidden, head, targets, weights = numbers()

    def total(hidden, head, targets, weights):
        return jnp.sum(weights * token_loss(hidden, head, targets).nll)

    layout = meshes.layout_of(MESHES["tensor 4"], dummies.LLAMA)
    actual, _ = divided(layout, total)(hidden, padded(layout, head), targets, weights)
    logits = jnp.einsum("bmd,vd->bmv", hidden, head)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(actual, jnp.sum(weights * nll), rtol=1e-6)


@pytest.mark.parametrize("kind", [Divergence(), Divergence("jsd", 0.3)])
def test_a_sharded_teacher_gives_the_same_losses(kind):
    hidden, head, targets, weights = numbers()

    def total(hidden, head, targets, weights):
        outcome = distillation_loss(hidden, head, targets, hidden[:, ::-1], kind)
        return jnp.sum(weights * outcome.nll)

    layout = meshes.layout_of(MESHES["fsdp 2, tensor 4"], dummies.LLAMA)
    run = divided(layout, total, gradients=1)
    actual, (d_hidden,) = run(hidden, padded(layout, head), targets, weights)
    wanted = jax.jit(jax.value_and_grad(total))(hidden, head, targets, weights)
    np.testing.assert_allclose(actual, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(d_hidden, wanted[1], atol=5e-6)


LARGE = 250_112
"""The size of mT5's vocabulary."""


@functools.cache
def large_program() -> jax.stages.Compiled:
    """The loss of 2,560 positions with a frozen head sharded over 4 devices."""

    def total(hidden, head, targets, weights):
        return jnp.sum(weights * token_loss(hidden, head, targets).nll)

    config = dataclasses.replace(dummies.LLAMA, vocabulary_size=LARGE)
    layout = meshes.layout_of(MESHES["tensor 4"], config)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in jax.eval_shape(functools.partial(numbers_like, 512))
    ]
    return divided(layout, total, gradients=1).lower(*shapes).compile()


def numbers_like(rows: int) -> tuple[jax.Array, ...]:
    """The shapes of `numbers` for a large vocabulary."""
    return (
        jnp.zeros((rows, M, D)),
        jnp.zeros((LARGE, D)),
        jnp.zeros((rows, M), jnp.int32),
        jnp.zeros((rows, M)),
    )


def test_no_device_has_all_logits_or_the_whole_head():
    compiled = large_program()
    positions, part = 512 * M, LARGE // 4
    # 128 positions at a time.
    assert hlo.largest_array(compiled) == 128 * part
    assert (LARGE, D) not in hlo.array_shapes(compiled)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 128 * part * 4 < 4 * positions * part


def test_devices_exchange_few_numbers_per_position():
    exchanged = hlo.collectives(large_program())
    positions = 512 * M
    (hidden,) = (x for x in exchanged if x.size * x.runs == positions * D)
    assert hidden.kind == "all-reduce"  # the gradient, of which each has a part
    others = sum(x.size * x.runs for x in exchanged if x is not hidden)
    # Maximum logit twice (for the sum and the accuracy), sum, and target twice.
    assert others <= 5 * positions
