"""Conversions after a kill or power cut at each call to the file system."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.adapters.adapter import LORA, PROMPT, Adapter
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.tuned.adapter_conversion import ConversionSource, write_adapters
from tests.support.crash_states import read_tree, recorded
from tests.support.exhaustive import sample
from tests.support.small_runs import DECODER, write_model

PROMPT_PATH = "decoder/prompt/prompt"
LORA_PATH = "decoder/layers/self_attention/query/adapters/lora"


def source(base: Path, form: str, sign: int) -> ConversionSource:
    """Returns a prompt, or LoRA for a form that multiplies it into the weights."""
    if form == "merged":
        parameters = {
            f"{LORA_PATH}/a": np.ones((1, DECODER.width, 2), np.float32),
            f"{LORA_PATH}/b": np.full((1, 2, DECODER.width), sign, np.float32),
        }
        scalings = {"decoder/layers/self_attention/query": 1.0}
        adapter = Adapter(kind=LORA, parameters=parameters, scalings=scalings)
    else:
        vectors = np.full((4, DECODER.width), sign, np.float32)
        adapter = Adapter(kind=PROMPT, parameters={PROMPT_PATH: vectors})
    return ConversionSource("origin", [adapter], DECODER, str(base))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "model", DECODER)


@pytest.mark.parametrize("system", sample(1, ["exchange", "two renames"]))
@pytest.mark.parametrize(
    ("form", "replaces"),
    # A checkpoint is never replaced.
    sample(
        3,
        [
            *(("t5x", False), ("t5x", True), ("checkpoint", False)),
            *itertools.product(("npy", "peft", "merged"), (False, True)),
        ],
    ),
)
def test_a_conversion_can_be_repeated(
    form, replaces, system, base, tmp_path, monkeypatch
):
    if system == "two renames":
        monkeypatch.setattr(atomic_files, "exchange", lambda *_: False)
    root = tmp_path / "root"
    root.mkdir()
    name = "target.npy" if form == "npy" else "target"

    def convert(folder: Path, sign: int, force: bool = replaces) -> None:
        write_adapters(source(base, form, sign), folder / name, form, force=force)

    if replaces:
        convert(root, -1)
    before = read_tree(root)
    recording = recorded(root, lambda: convert(root, 1))
    expected = read_tree(root)
    assert expected != before
    for state_folder, state in recording.written(tmp_path / "states"):
        target = {path: x for path, x in state.items() if path.startswith("target")}
        whole = [{k: x for k, x in tree.items()} for tree in (before, expected)]
        if system == "exchange" or not replaces:
            assert target in whole
        if target == expected and not replaces:
            with pytest.raises(InputError, match="name another target"):
                convert(state_folder, 1)
        else:
            convert(state_folder, 1)
        assert read_tree(state_folder) == expected
