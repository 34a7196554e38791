"""LoRA adapters of MLX."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.core.errors import InputError
from tests.support.dummies import LLAMA

D = LLAMA.width
NAME = "model.layers.1.self_attn.q_proj"
CONFIG = {
    "fine_tune_type": "lora",
    "num_layers": 1,
    "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.1},
    "model": "some/model",
}
random = np.random.default_rng(0)
A = random.standard_normal((D, 2)).astype("f4")
B = random.standard_normal((2, D)).astype("f4")


def write(folder, config=CONFIG, **changes):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{NAME}.lora_a": A, f"{NAME}.lora_b": B}
    tensors = {n: x for n, x in (tensors | changes).items() if x is not None}
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def test_an_adapter_adds_scale_times_the_product(tmp_path):
    folder = read_folder(write(tmp_path / "a"))
    adapter = from_peft(folder, LLAMA, "here")
    path = "decoder/layers/self_attention/query"
    a, b = (adapter.parameters[f"{path}/adapters/lora/{x}"] for x in "ab")
    # MLX: y + scale * ((x @ lora_a) @ lora_b), in the last num_layers blocks.
    expected = np.stack([np.zeros((D, D)), 20 * A.astype(float) @ B])
    actual = adapter.scalings[path] * a.astype(float) @ b
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert folder.settings["base_model_name_or_path"] == "some/model"
    assert folder.settings["lora_dropout"] == 0.1


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIG | {"fine_tune_type": "dora"}, {}, "fine_tune_type 'dora', expected"),
        (CONFIG | {"lora_parameters": {"rank": 2}}, {}, "'scale', which is needed"),
        (CONFIG | {"lora_parameters": {"rank": 3, "scale": 1}}, {}, "expected rank 3"),
        (CONFIG, {f"{NAME}.lora_b": None}, r"no .*lora_b, expected both factors"),
        (CONFIG, {"model.norm.weight": A}, r"norm\.weight and no .*expected both"),
        ([], {}, "expected a JSON object"),
    ],
)
def test_other_folders_are_refused(config, changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_folder(write(tmp_path / "a", config, **changes))
