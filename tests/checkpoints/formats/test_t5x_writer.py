"""Whole checkpoints in T5X's format: our parameters, their names, and back."""

import gzip
import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import serialization

from prompt_tuning.checkpoints.formats.t5x_checkpoint import (
    open_t5x,
    write_t5x_checkpoint,
)
from prompt_tuning.checkpoints.restore_plan import plan_restore
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.families.t5x import t5x_arrays, t5x_recipes
from tests.support.expected_shapes import abstract
from tests.support.t5x_fixtures import MSGPACK, T5X_CONFIG

TINY: dict[str, Any] = {
    "width": 8,
    "feed_forward_width": 16,
    "layers": 2,
    "heads": 4,
    "head_width": 3,
}
CONFIG = t5_config(vocabulary_size=30, **TINY)
PROMPTS = ("encoder/prompt/prompt", "decoder/prompt/prompt")


def parameters_of(config, dtype):
    """Returns random parameters of a T5 with two prompts."""
    random = np.random.default_rng(0)
    shapes = {path: leaf.shape for path, leaf in abstract(config).items()}
    shapes |= dict.fromkeys(PROMPTS, (5, config.width))
    return {path: random.normal(size=x).astype(dtype) for path, x in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_our_parameters_are_restored_from_a_written_checkpoint(dtype, tmp_path):
    parameters = parameters_of(CONFIG, dtype)
    folder = tmp_path / "checkpoint_7"
    folder.mkdir()
    write_t5x_checkpoint(folder, t5x_arrays(CONFIG, parameters), 7)
    stored = open_t5x(tmp_path)
    shapes = {
        path: jax.ShapeDtypeStruct(array.shape, dtype)
        for path, array in parameters.items()
    }
    theirs = ((r"(.*)/prompt/prompt", r"\1/prompt/prompt/prompt"),)
    recipes = t5x_recipes(CONFIG)
    plan = plan_restore(shapes, recipes, stored, assignment_map=theirs)
    assert not (plan.fresh or plan.ignored)
    restored = plan.restore()
    assert restored.keys() == parameters.keys()
    for path, array in parameters.items():
        np.testing.assert_array_equal(restored[path], array)
    assert stored["encoder/layers_1/mlp/wo/kernel"].dtype == dtype


def test_files_have_the_names_and_codes_of_t5x(tmp_path):
    parameters = parameters_of(CONFIG, np.float32)
    write_t5x_checkpoint(tmp_path, t5x_arrays(CONFIG, parameters), 7)
    tree: Any = serialization.msgpack_restore((tmp_path / "checkpoint").read_bytes())
    assert (tree["version"], tree["optimizer"]["state"]["step"]) == (3, 7)
    target = tree["optimizer"]["target"]
    scale = target["decoder"]["layers_1"]["pre_mlp_layer_norm"]["scale"]
    np.testing.assert_array_equal(scale, parameters["decoder/layers/mlp_norm/scale"][1])
    spec = target["encoder"]["prompt"]["prompt"]["prompt"]
    assert {"driver", "kvstore", "metadata"} <= spec.keys()
    folder = tmp_path / spec["kvstore"]["path"]
    assert folder.name == "target.encoder.prompt.prompt.prompt"
    assert json.loads((folder / ".zarray").read_text())["dtype"] == "<f4"
    prompt = np.frombuffer(gzip.decompress((folder / "0.0").read_bytes()), "<f4")
    np.testing.assert_array_equal(
        prompt.reshape(5, 8), parameters["encoder/prompt/prompt"]
    )


def test_models_that_t5x_has_no_names_for_are_refused():
    parameters = parameters_of(CONFIG, np.float32)
    parameters["encoder/layers/adapters/x/lora/a"] = np.zeros((2, 8, 1), "f")
    with pytest.raises(InputError, match="differs in encoder/layers/adapters"):
        dict(t5x_arrays(CONFIG, parameters))


def test_their_checkpoint_is_written_back_with_equal_arrays(tmp_path):
    theirs = open_t5x(MSGPACK)
    plan = plan_restore(abstract(T5X_CONFIG), t5x_recipes(T5X_CONFIG), theirs)
    write_t5x_checkpoint(tmp_path, t5x_arrays(T5X_CONFIG, plan.restore()), 0)
    back = open_t5x(tmp_path)
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(back[name].read(), tensor.read())
