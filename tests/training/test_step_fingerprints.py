"""Fingerprints of trained parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from prompt_tuning.training.step_fingerprints import as_text, fingerprint

VALUES = {
    "prompt": np.linspace(-1, 1, 24, dtype="f4").reshape(4, 6),
    "scale": np.array(2, "f4"),
    "half": np.arange(5, dtype="f2"),
}


def text(arrays) -> str:
    return as_text(fingerprint(arrays))


def test_host_and_device_compute_the_same_fingerprint():
    half = {"half": VALUES["half"].astype(jnp.bfloat16)}
    for values in (VALUES, half):
        on_device = jax.tree.map(jnp.asarray, values)
        assert text(values) == text(on_device)
        assert len(text(values)) == 32


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_a_single_bit_changes_every_word(bit):
    changed = VALUES["prompt"].copy()
    changed.view("u4")[3, 5] ^= np.uint32(1 << bit)
    before, after = text(VALUES), text(VALUES | {"prompt": changed})
    for i in range(0, 32, 8):
        assert before[i : i + 8] != after[i : i + 8]


def test_order_and_names_count():
    flipped = VALUES | {"prompt": VALUES["prompt"][::-1]}
    renamed = {f"x/{name}": value for name, value in VALUES.items()}
    assert len({text(x) for x in (VALUES, flipped, renamed)}) == 3


def test_shards_have_the_fingerprint_of_the_whole():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    one_device = jnp.asarray(VALUES["scale"])
    sharded = {**VALUES, "prompt": jax.device_put(VALUES["prompt"], sharding)}
    assert text(sharded | {"scale": one_device}) == text(VALUES)
