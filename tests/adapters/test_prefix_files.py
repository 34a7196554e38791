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
    with pytest.raises(InputError, match="_keys has 2 layers, expected 4"):
        read_prefix_file(file, (4, 3, 4))
    torch.save({"weight": torch.zeros(2)}, file)
    with pytest.raises(InputError, match="'weight' is not a list of tensors"):
        read_prefix_file(file, STACK)

    def both(part, keys, values):
        return {f"{part}_keys": [keys] * 2, f"{part}_values": [values, values]}

    zeros = torch.zeros(1, 3, 5, 4)
    learned = both("trainable", zeros.half(), zeros.bfloat16())
    torch.save(learned, file)
    assert read_prefix_file(file, STACK).shape == prefix.shape
    heads = torch.zeros(1, 2, 1, 4)
    torch.save(learned | both("frozen", heads, heads), file)
    with pytest.raises(InputError, match=r"frozen_keys .*\(1, 2, 1, 4\), expected"):
        read_prefix_file(file, STACK)
    torch.save(both("trainable", torch.tensor(1.0), torch.tensor(1.0)), file)
    with pytest.raises(InputError, match=r"trainable_keys .* \(\), expected"):
        read_prefix_file(file, STACK)
    torch.save({"keys": layers(prefix[:, 0])}, file)
    with pytest.raises(InputError, match="expected trainable_keys"):
        read_prefix_file(file, STACK)


def test_a_prefix_starts_from_a_run_a_folder_and_an_array_as_composed(tmp_path):
    run = pt.tune(
        MODEL,
        pt.KeyValuePrefix(length=2, frozen_slots=1),
        [("a=", "b")] * 4,
        steps=1,
        directory=tmp_path / "run",
        progress=False,
    )
    run.to_peft(tmp_path / "peft")
    np.save(tmp_path / "array.npy", np.asarray(run.trained[PREFIX]))
    model = pt.load(MODEL)

    def start(*names):
        paths = [str(tmp_path / name) for name in names]
        length = 2 * len(paths)
        prefix = pt.KeyValuePrefix(length=length, initializer=pt.from_file(paths))
        return model.attach(prefix).partition()[0][PREFIX]

    np.testing.assert_array_equal(start("array.npy"), run.trained[PREFIX])
    # The keys of this model are rotated.
    started = start("run", "peft", "array.npy")
    expected = pt.compose([run, run, run]).partition()[0][PREFIX]
    np.testing.assert_array_equal(started, expected)
    own = run.trained[PREFIX]
    assert np.abs(started[:, 0, :2] - own[:, 0]).max() > 1e-3
    np.testing.assert_array_equal(started[:, 1, :2], own[:, 1])
    paths = [str(tmp_path / "run")] * 2
    with pytest.raises(InputError, match="several files for a prefix alone"):
        model.attach(pt.SoftPrompt(length=2, initializer=pt.from_file(paths)))
    with pytest.raises(InputError, match=r"has 4 slots, expected 3: .*length.*4"):
        model.attach(pt.KeyValuePrefix(length=3, initializer=pt.from_file(paths)))
    with pytest.raises(InputError, match="an empty list of files"):
        model.attach(pt.KeyValuePrefix(length=3, initializer=pt.from_file([])))
