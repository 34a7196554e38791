"""Texts that become prefixes, by the command and from Python."""

import json

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.texts.text_study import cut_chunks

MODEL = "bundled:skills-decoder"
TEXT = "upper: apple=APPLE upper: chair=CHAIR reverse: flame=emalf reverse: dog=god"
PREFIX = "decoder/prompt/prompt"


def test_a_document_becomes_a_run_and_a_cartridge(tmp_path, capsys):
    document, output = tmp_path / "text.txt", tmp_path / "memory"
    document.write_text(TEXT)
    command = ["remember", str(document), "--model", MODEL, "--output", str(output)]
    sizes = ["--slots", "12", "--rows", "64", "--held_out", "16", "--batch_size", "16"]
    assert main([*command, *sizes, "--steps", "12", "--start", "first"]) == 0
    assert "whole text" in capsys.readouterr().out
    measured = json.loads((output / "memory.json").read_text())
    # The prefix starts as its first tokens act, and is trained to act as all do.
    divergence = {name: values["divergence"] for name, values in measured.items()}
    assert abs(divergence["whole text"]) < 1e-4
    assert divergence["memory"] < 0.6 * divergence["first tokens"]
    settings = json.loads((output / "peft" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["num_frozen_tokens"]) == ("CARTRIDGE", 1)
    memory = pt.load_tuned(output)
    start = pt.KeyValuePrefix(length=12, initializer=pt.from_text(TEXT))
    first = pt.load(MODEL).attach(start).partition()[0][PREFIX][:, :, 0]
    np.testing.assert_array_equal(memory.trained[PREFIX][:, :, 0], first)
    # The same command finds everything done; another document is refused.
    before = (output / "study" / "train.hdf5").read_bytes()
    assert main([*command, *sizes, "--steps", "12", "--start", "first"]) == 0
    assert (output / "study" / "train.hdf5").read_bytes() == before
    document.write_text(TEXT + " tail: house=ouse")
    assert main([*command, *sizes, "--steps", "12", "--start", "first"]) == 2


@pytest.mark.parametrize(
    ("model", "text", "settings", "message"),
    [
        (MODEL, "upper: apple=", {"slots": 16}, "the memory 16 slots"),
        (MODEL, TEXT * 3, {"slots": 16}, "give at most"),
        (MODEL, TEXT, {"slots": 8, "chunk": 3}, "expected at least 8"),
        ("bundled:skills-t5", TEXT, {"slots": 8}, "of a decoder-only model"),
    ],
)
def test_a_text_that_cannot_be_remembered_is_refused(
    tmp_path, model, text, settings, message
):
    with pytest.raises(InputError, match=message):
        pt.remember(model, text, directory=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_chunks_have_nearly_the_same_length():
    assert [len(x) for x in cut_chunks(range(10), 4)] == [3, 4, 3]
