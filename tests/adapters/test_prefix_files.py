"""Prefixes from files of several kinds."""

# pyright: reportMissingImports=false

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.adapters.prefix_files import read_prefix_file
from prompt_tuning.core.errors import InputError

STACK = (2, 3, 4)
MODEL, PREFIX = "bundled:skills-decoder", "decoder/prompt/prompt"


def numbers(slots):
    rng = np.random.default_rng(slots)
    return rng.normal(size=(2, 2, slots, 3, 4)).astype("f4")  # [L, 2, P, G, K]


@pytest.mark.torch
@pytest.mark.parametrize("module", [True, False], ids=["ParameterList", "list"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_cartridge_of_torch_is_read(tmp_path, module, frozen):
    import torch

    prefix, file = numbers(5), tmp_path / "cartridge.pt"

    def layers(part):
        tensors = [torch.tensor(x.swapaxes(0, 1)[None]) for x in part]  # [1, G, P, K]
        parameters = [torch.nn.Parameter(x) for x in tensors]
        return torch.nn.ParameterList(parameters) if module else parameters

    torch.save(
        {
            "trainable_keys": layers(prefix[:, 0, frozen:]),
            "trainable_values": layers(prefix[:, 1, frozen:]),
            "frozen_keys": layers(prefix[:, 0, :frozen]) if frozen else [],
            "frozen_values": layers(prefix[:, 1, :frozen]) if frozen else [],
        },
        file,
    )
    np.testing.assert_array_equal(read_prefix_file(file, STACK), prefix)
    with pytest.raises(InputError, match=r"\(2, 2, 5, 3, 4\), expected a prefix \(4,"):
        read_prefix_file(file, (4, 3, 4))
    torch.save({"weight": torch.zeros(2)}, file)
    with pytest.raises(InputError, match="'weight' is not a list of tensors"):
        read_prefix_file(file, STACK)
    torch.save({"keys": layers(prefix[:, 0])}, file)
    with pytest.raises(InputError, match="expected trainable_keys"):
        read_prefix_file(file, STACK)


def test_a_prefix_starts_from_a_run_a_folder_and_an_array_one_behind_the_other(
    tmp_path,
):
    run = pt.tune(
        MODEL,
        pt.KeyValuePrefix(length=2, frozen_slots=1),
        [("a=", "b")] * 4,
        steps=1,
        directory=tmp_path / "run",
        progress=False,
    )
    run.to_peft(tmp_path / "peft")
    expected = np.asarray(run.trained[PREFIX])
    np.save(tmp_path / "array.npy", -expected)
    paths = [str(tmp_path / name) for name in ("run", "peft", "array.npy")]
    prefix = pt.KeyValuePrefix(length=6, initializer=pt.from_file(paths))
    started = pt.load(MODEL).attach(prefix).partition()[0][PREFIX]
    np.testing.assert_array_equal(
        started, np.concatenate([expected, expected, -expected], axis=2)
    )
    with pytest.raises(InputError, match="several files for a prefix alone"):
        prompt = pt.SoftPrompt(length=2, initializer=pt.from_file(paths))
        pt.load(MODEL).attach(prompt)
