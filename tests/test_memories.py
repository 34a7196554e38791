"""Texts that become prefixes, by the command and from Python."""

import dataclasses
import json

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.config.run import DataSource
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.memory_comparison import measure_memory
from scripts import recall

MODEL, RECALL = "bundled:skills-decoder", "bundled:recall"
TEXT = "upper: apple=APPLE upper: chair=CHAIR reverse: flame=emalf reverse: dog=god"
PREFIX = "decoder/prompt/prompt"


@pytest.mark.slow
def test_a_document_becomes_a_run_and_a_cartridge(tmp_path, capsys):
    text, questions = recall.document(7, 12)
    document, output = tmp_path / "facts.txt", tmp_path / "memory"
    document.write_text(text)
    command = ["remember", str(document), "--model", RECALL, "--out", str(output)]
    sizes = ["--slots", "12", "--rows", "128", "--held_out", "16", "--batch_size", "32"]
    sizes += ["--passage", "6"]
    assert main([*command, *sizes, "--steps", "100", "--start", "first"]) == 0
    assert "whole text" in capsys.readouterr().out
    measured = json.loads((output / "memory.json").read_text())
    # The prefix starts as its first tokens act, and is trained to act as all do.
    divergence = {name: values["divergence"] for name, values in measured.items()}
    assert abs(divergence["whole text"]) < 1e-4
    assert divergence["memory"] < 0.6 * divergence["first tokens"]
    settings = json.loads((output / "peft" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["num_frozen_tokens"]) == ("CARTRIDGE", 1)
    memory = pt.load_tuned(output)
    start = pt.KeyValuePrefix(length=12, initializer=pt.from_text(text))
    first = pt.load(RECALL).attach(start).partition()[0][PREFIX][:, :, 0]
    np.testing.assert_array_equal(memory.trained[PREFIX][:, :, 0], first)
    # What the questions follow decides the answers.
    lines = [json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in questions]
    asked = tmp_path / "questions.jsonl"
    asked.write_text("".join(lines))
    data = DataSource(files=[str(asked)])
    evaluation = Evaluation(data=data, exact_match=True)
    exact = {
        name: (values["exact_match"], values["positions"], values["compression"])
        for name, values in measure_memory(memory.run, evaluation).items()
    }
    assert exact["whole text"] == (1, 72, 1) and exact["nothing"] == (0, 0, 0)
    # The first tokens are two facts of twelve.
    assert exact["first tokens"] == (pytest.approx(1 / 6), 12, 6)
    assert exact["memory"][0] > exact["first tokens"][0]
    # The same command finds everything done; other rows or documents are refused.
    before = (output / "study" / "train.hdf5").read_bytes()
    assert main([*command, *sizes, "--steps", "100", "--start", "first"]) == 0
    assert (output / "study" / "train.hdf5").read_bytes() == before
    assert main([*command, *sizes, "--rows", "129", "--start", "first"]) == 2
    assert "rows is 129 and was 128" in capsys.readouterr().err
    document.write_text(text + "bagu=fugo\n")
    assert main([*command, *sizes, "--steps", "100", "--start", "first"]) == 2


def test_only_a_memory_is_compared_with_its_document(tmp_path, capsys):
    run = pt.tune(
        MODEL,
        pt.SoftPrompt(length=2),
        [("a=", "b")] * 4,
        steps=1,
        objective=pt.ContextDistillation(context=TEXT),
        directory=tmp_path / "run",
        evaluation=[("a=", "b")],
        progress=False,
    )
    evaluate = ["evaluate", "--run", run.run.directory, "--memory"]
    assert main(evaluate) == 2
    assert "so it has no memory to measure" in capsys.readouterr().err
    assert main([*evaluate, "--baseline"]) == 2
    assert "leave out --prompt, --baseline" in capsys.readouterr().err
    own = dataclasses.replace(run.run, objective=ContextDistillation(context_key="k"))
    assert own.evaluation is not None
    with pytest.raises(InputError, match="there is no single text to compare"):
        measure_memory(own, own.evaluation)
    # A soft prompt is stored under the path of a prefix.
    with pytest.raises(InputError, match=r"memory 0 is not a .* \(2, 128\)"):
        pt.compose([run, run])


@pytest.mark.parametrize(
    ("model", "text", "settings", "message"),
    [
        (MODEL, "upper: apple=", {"slots": 16}, "has 13 tokens, expected at least 15"),
        (MODEL, TEXT * 3, {"slots": 16}, "give at most"),
        (MODEL, TEXT * 9999, {"slots": 16}, "bytes, expected at most 419,430"),
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


def test_a_model_that_cannot_have_the_prefix_writes_no_rows(tmp_path):
    model = pt.load(MODEL, weights="streamed")
    with pytest.raises(InputError, match="on one device that holds all its weights"):
        pt.remember(model, TEXT, slots=8, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_of_another_run_gets_no_rows(tmp_path):
    (tmp_path / "config.gin").touch()
    with pytest.raises(InputError, match="has a run that is not a memory"):
        pt.remember(MODEL, TEXT, slots=8, directory=tmp_path)
    assert not (tmp_path / "study").exists()
