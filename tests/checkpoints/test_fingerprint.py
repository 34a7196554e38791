"""Checkpoints are distinguished by a sample of their numbers."""

import jax
import numpy as np
import pytest

from prompt_tuning.checkpoints.fingerprint import sampled
from prompt_tuning.checkpoints.restore_plan import RestorePlan, plan_restore
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    layered,
    transpose,
)

LAYERS = 6
SHAPES = {"kernel": (LAYERS, 40, 30), "scale": (7,), "table": (500, 40)}
RECIPES = {
    "kernel": layered("layer_{}", LAYERS, transpose),
    "scale": Recipe(("scale",)),
    "table": Recipe(("table",)),
}


def stored(pieces: tuple[int, int] | None = None, dtype: str = "f4", **changes):
    """A checkpoint with changes to some arrays, and the sizes of the reads from it."""
    random, tensors, sizes = np.random.default_rng(0), {}, []
    shapes = {f"layer_{i}": (30, 40) for i in range(LAYERS)}
    shapes |= {"scale": (7,), "table": (500, 40)}
    for name, shape in shapes.items():
        array = random.standard_normal(shape).astype(dtype)
        if name in changes:
            changes[name](array)

        def read(block, array=array):
            sizes.append(array[block].nbytes)
            return array[block]

        chunk_shape = pieces if len(shape) == 2 else None
        tensors[name] = StoredTensor(
            shape, array.dtype, "/ckpt/file", read, chunk_shape
        )
    return tensors, sizes


def plan(tensors, dtype: str = "float32", **paths: None) -> RestorePlan:
    abstract = {path: jax.ShapeDtypeStruct(x, dtype) for path, x in SHAPES.items()}
    assigned = [(path, None) for path in paths]
    return plan_restore(abstract, RECIPES, tensors, assignment_map=assigned)


def lines(*arguments, **changes) -> dict[str, str]:
    fingerprint = sampled(plan(stored(*arguments, **changes)[0]))
    return dict(line.split(": ") for line in fingerprint)


def double(array: np.ndarray) -> None:
    array *= 2


@pytest.mark.parametrize("pieces", [None, (16, 16)])
@pytest.mark.parametrize(
    ("changed", "path"), [("layer_5", "kernel"), ("scale", "scale"), ("table", "table")]
)
def test_only_the_changed_parameters_line_differs(pieces, changed, path):
    one, same = lines(pieces), lines(pieces)
    other = lines(pieces, **{changed: double})
    assert one == same and one.keys() == SHAPES.keys()
    assert [p for p in one if one[p] != other[p]] == [path]


def test_another_type_is_another_checkpoint():
    assert all(x != lines(dtype="f8")[path] for path, x in lines().items())


def test_unrestored_arrays_are_not_read():
    tensors, _ = stored()
    fingerprint = sampled(plan(tensors, scale=None))
    assert [line.partition(":")[0] for line in fingerprint] == ["kernel", "table"]


@pytest.mark.parametrize("pieces", [None, (16, 16)])
def test_a_fingerprint_reads_little(pieces):
    tensors, sizes = stored(pieces)
    sampled(plan(tensors))
    if pieces is None:
        assert len(sizes) <= 64 + LAYERS + 64 + 7
        assert max(sizes) <= 4 * 64
    else:
        # One chunk of some of the layers, one of the table, and the scale.
        assert len(sizes) == 4 + 1 + 7
        assert max(sizes) == 4 * 16 * 16


def test_int8_scales_belong_to_the_same_arrays():
    tensors, sizes = stored()
    abstract = {
        "kernel": jax.ShapeDtypeStruct((LAYERS, 40, 30), np.int8),
        "kernel_scale": jax.ShapeDtypeStruct((LAYERS, 30), np.float32),
    }
    fingerprint = sampled(plan_restore(abstract, RECIPES, tensors))
    assert len(fingerprint) == 1 and len(sizes) <= 64 + LAYERS
