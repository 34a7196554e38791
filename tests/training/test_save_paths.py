"""`Run.save_paths` keeps any parameter that its patterns match."""

from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from tests.support.small_runs import tune


def test_a_frozen_parameter_is_written_once(files, tmp_path):
    choices: dict[str, Any] = {"Run.save_paths": [".*/embedding"], "Run.steps": 1}
    choices |= {"Pretrained.parameter_dtype": "bfloat16"}
    assert tune(files, tmp_path / "run", **choices) == 0
    (written,) = (tmp_path / "run" / "kept_prompts" / "frozen").iterdir()
    table = load_file(files.decoder / "model.safetensors")["model.embed_tokens.weight"]
    expected = table.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.load(written), expected)
