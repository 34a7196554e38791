"""Labels with probabilities for inputs without targets."""

import dataclasses
import io
import json
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from flax import nnx

import prompt_tuning as pt
from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.cli.main import main, split_bindings
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.data.rows.text_records import lines_of
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.losses.class_objective import ClassObjective
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.tuned.input_encoding import encode_inputs
from prompt_tuning.tuned.prediction import label_settings
from scripts import skills
from tests.support import dummies
from tests.support.small_runs import DECODER, LENGTH, UPPER, write_pairs
from tests.support.small_tokenizer import CHAT, write_tokenizer

HELD_OUT = UPPER[32:36]
INPUTS = [given for given, _ in HELD_OUT]
LABELS = [completion for _, completion in HELD_OUT]


class Tuned(NamedTuple):
    """A model with a prompt, as Python and as the options of a command."""

    model: pt.TunedModel
    options: list[str]


@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory) -> Tuned:
    """A config whose evaluation ranks labels, with a prompt in a file."""
    folder = tmp_path_factory.mktemp("predict")
    prompt = folder / "prompt.npy"
    np.save(prompt, np.random.default_rng(0).normal(size=(LENGTH, 16)).astype("f4"))
    held_out = write_pairs(folder / "held_out.jsonl", HELD_OUT)
    settings = {"EVALUATION_FILES": str(held_out), "Evaluation.labels": LABELS}
    options = [*files.arguments(folder / "none", **settings), f"--prompt={prompt}"]
    return Tuned(pt.load_tuned(prompt, base=files.decoder), options)


@pytest.fixture
def unlabelled(tmp_path) -> Path:
    """The held-out inputs without their completions, longest first."""
    file = tmp_path / "new.jsonl"
    lines = [{"prompt": given, "id": i} for i, given in enumerate(INPUTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return file


def predicted(capsys, *arguments) -> list[dict]:
    capsys.readouterr()
    assert main(["predict", *map(str, arguments)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *arguments) -> str:
    assert main(["predict", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def probabilities(
    model: pt.TunedModel, text: str, length_normalize: bool = False
) -> np.ndarray:
    """The softmax of the labels' log-probabilities, from the model's logits."""
    given = [skills.BOS_ID, *skills.encode(text)]
    answers = [[*skills.encode(label), skills.EOS_ID] for label in LABELS]
    batch = dummies.make_batch(model.config, [(given, answer) for answer in answers])
    logits = np.array(dummies.logits(model.parameters, batch, graph=model.graph), "f8")
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    scores = [
        sum(row[place, token] for place, token in enumerate(answer))
        / (len(answer) if length_normalize else 1)
        for row, answer in zip(chances, answers, strict=True)
    ]
    return np.exp(scores) / np.exp(scores).sum()


@pytest.mark.slow
def test_probabilities_are_the_softmax_of_the_labels_scores(tuned, unlabelled, capsys):
    lines = predicted(capsys, unlabelled, *tuned.options)
    assert [line["input"] for line in lines] == INPUTS[::-1]
    assert [line["record"] for line in lines] == [{"id": i} for i in (3, 2, 1, 0)]
    for line in (lines[0], lines[-1]):
        expected = probabilities(tuned.model, line["input"])
        assert list(line["probabilities"]) == LABELS
        actual = list(line["probabilities"].values())
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
        assert line["label"] == LABELS[expected.argmax()]
    normalized = "--gin.Evaluation.length_normalize=True"
    (line,) = predicted(capsys, INPUTS[0], *tuned.options, normalized)
    expected = probabilities(tuned.model, INPUTS[0], length_normalize=True)
    np.testing.assert_allclose(
        list(line["probabilities"].values()), expected, rtol=1e-4
    )


def test_predictions_agree_with_the_evaluation(tuned, unlabelled, tmp_path, capsys):
    file = tmp_path / "predictions.jsonl"
    assert main(["evaluate", *tuned.options, "--predictions", str(file)]) == 0
    evaluated = [json.loads(line) for line in file.read_text().splitlines()]
    for line, other in zip(
        predicted(capsys, unlabelled, *tuned.options)[::-1], evaluated, strict=True
    ):
        assert (line["input"], line["label"]) == (other["input"], other["label"])
        nats = np.array(list(other["label_nats"].values()))
        np.testing.assert_allclose(
            list(line["probabilities"].values()),
            np.exp(-nats) / np.exp(-nats).sum(),
            rtol=1e-5,
        )


@pytest.mark.slow
def test_every_form_of_input_and_python_agree(
    tuned, unlabelled, tmp_path, capsys, monkeypatch
):
    texts = tmp_path / "new.txt"
    texts.write_text("\ufeff" + "\r\n".join(INPUTS) + "\n\n", encoding="utf-8")
    from_files = predicted(capsys, *tuned.options, texts)
    assert from_files == predicted(capsys, *tuned.options, *INPUTS)
    for content in (texts.read_bytes(), unlabelled.read_bytes()):
        stream = io.TextIOWrapper(io.BytesIO(content))
        monkeypatch.setattr("sys.stdin", stream)
        lines = predicted(capsys, *tuned.options)
        assert {line["input"]: line["label"] for line in lines} == {
            line["input"]: line["label"] for line in from_files
        }
    inputs = [INPUTS[0], {"prompt": INPUTS[1], "id": 3}]
    answers = tuned.model.predict(inputs, labels=LABELS)
    for answer, line in zip(answers, from_files[:2], strict=True):
        assert answer.label == line["label"]
        assert answer.probabilities == pytest.approx(line["probabilities"], rel=1e-4)
    single = tuned.model.predict(INPUTS[0], labels=LABELS)
    assert single.label == answers[0].label
    assert single.probabilities == pytest.approx(answers[0].probabilities, rel=1e-5)
    # The same batch gives the same bits.
    assert single == tuned.model.predict([INPUTS[0]], labels=LABELS)[0]
    with pytest.raises(pt.InputError, match="no labels"):
        tuned.model.predict(INPUTS[0])


def test_the_output_file_is_replaced_on_request_only(tuned, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    arguments = (*tuned.options, "ab=", "--output", output, "--labels", "X", "Y")
    assert "already exists" in refused(capsys, *arguments)
    assert output.read_text() == "mine"
    assert main(["predict", *map(str, arguments), "--force"]) == 0
    (line,) = map(json.loads, output.read_text().splitlines())
    assert sorted(line["probabilities"]) == ["X", "Y"]
    assert sum(line["probabilities"].values()) == pytest.approx(1)


def test_a_run_without_labels_writes_generated_text(tuned, capsys):
    without = ("--gin.Evaluation.labels=None", "--new_tokens=3")
    (line,) = predicted(capsys, *tuned.options, "ab=", *without)
    capsys.readouterr()
    assert main(["generate", *tuned.options, "ab=", "--new_tokens=3"]) == 0
    assert "ab=" + line["output"] == capsys.readouterr().out.rstrip("\n")


def test_a_class_objective_gives_the_labels_and_their_normalization(tuned):
    bindings = split_bindings(tuned.options)[1]
    bindings += ["Evaluation.labels = None", "Run.objective = @ClassObjective()"]
    bindings += ["ClassObjective.labels = ['x', 'y']"]
    configured = read_run(["runs/first_prompt.gin"], bindings)
    assert isinstance(configured.objective, ClassObjective)
    settings = label_settings(configured)
    assert settings is not None
    assert (list(settings.labels or ()), settings.length_normalize) == (
        ["x", "y"],
        True,
    )


@pytest.mark.slow
def test_inputs_that_cannot_be_used_are_refused(tuned, tmp_path, capsys, monkeypatch):
    long = tmp_path / "long.txt"
    long.write_text("ab=\n" + "a" * (60 - LENGTH) + "\n")
    assert f"{long}, line 2: a row of" in refused(capsys, *tuned.options, long)
    cut = "--gin.DataSource.on_too_long='truncate_left'"
    # The positions that remain after the prompt, the longest label and EOS, and BOS.
    kept = "a" * (64 - LENGTH - max(map(len, LABELS)) - 1 - 1)
    _, whole = predicted(capsys, *tuned.options, long, cut)
    (end,) = predicted(capsys, *tuned.options, kept)
    assert whole["probabilities"] == pytest.approx(end["probabilities"], rel=1e-4)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "ab="}\n')
    message = refused(capsys, *tuned.options, other)
    assert f"{other}, line 1: found the keys ['text'], expected 'prompt'" in message
    assert "no.jsonl not found" in refused(capsys, *tuned.options, "no.jsonl")
    files_last = (*tuned.options, "--labels", "a", "b", other)
    assert "before --labels" in refused(capsys, *files_last)
    assert "new_tokens is for" in refused(capsys, *tuned.options, "a", "--new_tokens=3")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "no input was given" in refused(capsys, *tuned.options)


def test_inputs_of_a_run_on_conversations_are_rendered(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "model", chat_template=CHAT))
    plan = mock.Mock(spec=RestorePlan, origin="folder")
    model = PromptedModel(
        dataclasses.replace(DECODER, vocabulary_size=tokenizer.vocabulary_size),
        *(
            mock.Mock(spec=nnx.GraphDef),
            PromptPair(None),
            Prompting(),
            tokenizer,
            plan,
            dict,
        ),
    )
    turn = {"role": "user", "content": "hi"}
    answered = [turn, {"role": "assistant", "content": "known"}]
    asked = [{"from": "human", "value": "hi"}]
    task = {"instruction": "hi", "input": "", "output": "known"}
    inputs = ["hi", *({"messages": turns} for turns in ([turn], answered, asked))]
    inputs += [{"conversations": asked}, {"conversation": answered}, task]
    encoded = encode_inputs(
        model, DataSource(files="x.jsonl", chat=True), lines_of(inputs, "prompt")
    )
    user, assistant = map(tokenizer.encode, ["<|user|>\nhi", "\n<|assistant|>\n"])
    assert encoded.rows == [[*user, tokenizer.eos_id, *assistant]] * len(inputs)
    assert encoded.texts == ["hi"] * len(inputs)
