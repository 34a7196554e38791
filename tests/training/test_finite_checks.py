"""A run whose numbers are not finite ends with a message that names the cause."""

import shutil

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.recorder import find_not_finite
from tests.support.small_runs import tune


def test_a_frozen_weight_that_is_not_finite_is_named(files, tmp_path, capsys):
    model = shutil.copytree(files.decoder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 3] = np.nan
    save_file(tensors, model / "model.safetensors")
    assert tune(files, tmp_path / "run", model, **{"Run.steps": 2}) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"decoder/layers/mlp/down/kernel of {model} has numbers that" in message
    assert "earning rate" not in message


def test_weights_of_every_kind_of_memory():
    numbers = np.ones((2, 3), np.float32)
    good = {"ids": jnp.arange(3), "kernel": jnp.ones(3, jnp.bfloat16)}
    good |= {"streamed": LayeredWeight.from_array("streamed", numbers)}
    assert find_not_finite(good) is None
    numbers[1, 2] = np.inf
    assert find_not_finite(good) == "streamed"
    infinite = jnp.full(3, jnp.inf, jnp.bfloat16)
    assert find_not_finite({"kernel": infinite}) == "kernel"
