"""Evaluation of a tuned prompt and of the frozen model with and without a text."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.data.text.templates import parse_template
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.tuned import comparison
from tests.support.exhaustive import sample
from tests.support.small_runs import LENGTH, UPPER, tune, write_pairs, write_rows

HELD_OUT = UPPER[32:36]
LABELS = sorted({completion for _, completion in HELD_OUT})


@pytest.fixture(scope="module", params=sample(1, ["decoder", "t5"]))
def run(request, files, tmp_path_factory) -> Path:
    """A finished run of a single step."""
    folder = tmp_path_factory.mktemp(request.param)
    held_out = write_pairs(folder / "held_out.jsonl", HELD_OUT)
    choices = {"Run.steps": 1, "EVALUATION_FILES": str(held_out)}
    model = getattr(files, request.param)
    assert tune(files, folder / "run", model, **choices) == 0
    return folder / "run"


def output(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def columns(printed: str) -> dict[str, dict[str, str]]:
    """Returns the cells of the table, by column and then by metric."""
    head = next(line for line in printed.splitlines() if line.startswith("┃"))
    names = [name.strip() for name in head.strip("┃").split("┃")]
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in printed.splitlines()
        if line.startswith("│")
    ]
    return {
        name: {row[0]: row[index] for row in rows}
        for index, name in enumerate(names)
        if index
    }


@pytest.mark.slow
def test_the_frozen_model_is_compared_with_the_prompt(run, capsys):
    compared = columns(output(capsys, "--run", run, "--baseline"))
    assert list(compared) == ["tuned", "no prompt"]
    tuned = columns(output(capsys, "--run", run))
    bare = columns(output(capsys, "--run", run, "--gin.Run.prompt=None"))
    for name, alone in (("tuned", tuned), ("no prompt", bare)):
        whole = {m: f"{alone['value'][m]} {alone['95 %'][m]}" for m in alone["value"]}
        assert compared[name] == whole
    assert compared["tuned"]["loss"] != compared["no prompt"]["loss"]


@pytest.mark.slow
def test_a_text_prompt_precedes_each_input(run, tmp_path, capsys):
    text = "up: "
    named = [(text + given, completion) for given, completion in HELD_OUT]
    file = write_pairs(tmp_path / "named.jsonl", named)
    expected = columns(
        output(
            capsys,
            *("--run", run, "--gin.Run.prompt=None"),
            f"--gin.EVALUATION_FILES={str(file)!r}",
        )
    )["value"]
    table = columns(output(capsys, "--run", run, "--text_prompt", text))
    assert list(table) == ["tuned", f"text {text!r}"]
    assert {m: v.split()[0] for m, v in table[f"text {text!r}"].items()} == expected


def test_braces_of_a_text_prompt_are_literal_and_the_template_follows():
    def text(**how) -> str:
        source = DataSource(files="x.jsonl", **how)
        template = parse_template(comparison._template(source, "{up} a}"))
        return "|".join(template.render({"prompt": "hi", "key": "lo"}))

    assert text() == "{up} a}hi"
    assert text(prompt_key=None) == "{up} a}"
    assert text(template="{key} or {soft:2}{prompt}") == "{up} a}lo or |hi"


def test_a_text_prompt_precedes_the_ids_of_hdf5_rows(run, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.hdf5", HELD_OUT)
    options = ("--run", run, "--text_prompt", "up:")
    of_text = columns(output(capsys, *options))
    of_rows = columns(output(capsys, *options, f"--gin.EVALUATION_FILES={str(rows)!r}"))
    assert of_rows == of_text


@pytest.mark.exhaustive
def test_labels_and_categories_are_measured_for_all_systems(run, tmp_path, capsys):
    file = tmp_path / "kinds.jsonl"
    lines = [
        {
            "prompt": given,
            "completion": completion,
            "kind": "even" if index % 2 else "odd",
        }
        for index, (given, completion) in enumerate(HELD_OUT)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = output(
        capsys,
        *("--run", run, "--baseline", f"--gin.EVALUATION_FILES={str(file)!r}"),
        *(f"--gin.Evaluation.labels={LABELS}", "--gin.Evaluation.calibrate=['n=']"),
        "--gin.Evaluation.category_key='kind'",
    )
    assert printed.count("calibrated_macro_f1") == 3
    assert "│ even (2) " in printed and "│ odd (2) " in printed


@pytest.mark.slow
def test_predictions_are_written_with_each_examples_scores(run, tmp_path, capsys):
    file = tmp_path / "predictions.jsonl"
    options = ("--run", run, "--baseline", "--predictions", file)
    text = ("--gin.Evaluation.exact_match=True", "--gin.Evaluation.metrics=['squad']")
    printed = output(capsys, *options, *text)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["system"] for line in lines] == ["tuned"] * 4 + ["no prompt"] * 4
    for line, (given, completion) in zip(lines, HELD_OUT * 2, strict=True):
        assert (line["input"], line["target"]) == (given, completion)
        assert line["scores"]["exact_match"] == float(line["output"] == completion)
    # Each completion has EOS too; the loss is a mean over tokens.
    weights = np.array([len(completion) + 1 for _, completion in HELD_OUT])
    losses = np.array([line["scores"]["loss"] for line in lines[:4]])
    loss = columns(printed)["tuned"]["loss"].split()[0]
    assert float(loss) == pytest.approx((losses @ weights) / weights.sum(), abs=6e-5)


def test_the_answers_to_labels_are_predictions(run, tmp_path, capsys):
    file = tmp_path / "predictions.jsonl"
    labels = f"--gin.Evaluation.labels={LABELS}"
    output(capsys, "--run", run, labels, "--predictions", file)
    for line in map(json.loads, file.read_text().splitlines()):
        nats = line["label_nats"]
        assert line["output"] == line["label"] == min(nats, key=nats.get)
        assert line["scores"]["label_accuracy"] == (line["label"] == line["target"])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("always")
def test_a_warning_counts_completions_that_are_too_long(run, capsys):
    """A token of the model is one letter."""
    lengths = sorted(len(completion) for _, completion in HELD_OUT)
    few, all_of_them = lengths[-1] - 1, lengths[-1]

    def told(new_tokens, *options) -> str:
        tokens = f"--gin.Evaluation.new_tokens={new_tokens}"
        assert main(["evaluate", "--run", str(run), tokens, *options]) == 0
        return capsys.readouterr().err

    exact = "--gin.Evaluation.exact_match=True"
    cut = lengths.count(all_of_them)
    results = told(few, exact)
    assert f"warning: {cut} of 4 completions are longer" in results
    assert f"new_tokens = {few} (the longest has {all_of_them} tokens)" in results
    assert "completions" not in told(all_of_them, exact)
    assert "completions" not in told(few)


def test_predictions_without_a_tokenizer_are_refused_before_measuring(
    run, files, tmp_path, capsys, monkeypatch
):
    rows = write_rows(tmp_path / "rows.hdf5", HELD_OUT)
    bare = tmp_path / "model"
    # The fixture's folder is named after the model, followed by a number.
    shutil.copytree(getattr(files, run.parent.name[:-1]), bare)
    for file in (*bare.glob("tokenizer*"), *bare.glob("*.model")):
        file.unlink()
    options = (
        *("--run", run, f"--gin.EVALUATION_FILES={str(rows)!r}"),
        f"--gin.MODEL={str(bare)!r}",
    )
    output(capsys, *options)
    monkeypatch.setattr(comparison, "open_comparison", None)
    file = tmp_path / "predictions.jsonl"
    message = refused(capsys, *options, "--predictions", file)
    assert "no tokenizer next to it" in message
    assert not file.exists()


def refused(capsys, *arguments) -> str:
    assert main(["evaluate", *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_incomparable_inputs_are_refused(run, tmp_path, capsys):
    there = tmp_path / "there.jsonl"
    there.write_text("mine")
    message = refused(capsys, "--run", run, "--predictions", there)
    assert f"{there} already exists; --force" in message
    assert there.read_text() == "mine"
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((LENGTH, 16), "f4"))
    two = ("--prompt", tmp_path / "a.npy", "--prompt", tmp_path / "b.npy")
    assert "need a single --prompt" in refused(capsys, "--run", run, *two, "--baseline")
    text = ("--text_prompt", "a")
    assert "names a text twice" in refused(capsys, "--run", run, *text, *text)
    assert "is empty" in refused(capsys, "--run", run, "--text_prompt", "")
    metric = "--gin.Evaluation.metrics=['rogue']"
    assert "expected some of perplexity" in refused(capsys, "--run", run, metric)


@pytest.mark.slow
def test_a_text_that_leaves_no_room_is_refused(files, tmp_path, capsys):
    assert tune(files, tmp_path / "run", Run__steps=1) == 0
    long = ("--run", tmp_path / "run", "--text_prompt", "a" * 60)
    assert "expected at most 64" in refused(capsys, *long)
    skip = "--gin.evaluation/DataSource.on_too_long='skip'"
    some = write_pairs(tmp_path / "some.jsonl", [("a=", "A"), ("abcdefgh=", "B")])
    message = refused(
        capsys, *long[:-1], "a" * 55, skip, f"--gin.EVALUATION_FILES={str(some)!r}"
    )
    assert "1 examples fit, and 2 with tuned" in message


@pytest.mark.exhaustive
def test_task_prompts_are_compared_with_the_frozen_model(files, tmp_path, capsys):
    file = tmp_path / "tasks.jsonl"
    lines = [
        {"prompt": given, "completion": completion, "task": index % 2}
        for index, (given, completion) in enumerate(HELD_OUT)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = files.arguments(
        tmp_path / "run",
        Run__steps=1,
        **{"TRAIN_FILES": str(file), "EVALUATION_FILES": str(file)},
        **{"TASKS": 2, "PROMPT_ID_KEY": "task", "Evaluation.calibrate": ["n="]},
        **{"Evaluation.labels": LABELS},
    )
    more = ["--gin_file=prompts/multitask_add.gin", "--gin_file=data/task_ids.gin"]
    assert main(["train", *arguments, *more]) == 0
    table = columns(output(capsys, "--run", tmp_path / "run", "--baseline"))
    assert table["tuned"]["loss"] != table["no prompt"]["loss"]
    assert "calibrated_accuracy" in table["no prompt"]


@pytest.mark.exhaustive
def test_the_frozen_model_reads_the_text_of_a_template(files, tmp_path, capsys):
    arguments = files.arguments(
        tmp_path / "run", Run__steps=1, TEMPLATE='{soft:2}word {prompt}{soft:"up"}'
    )
    assert main(["train", *arguments, "--gin_file=data/template.gin"]) == 0
    words = [("word " + given, completion) for given, completion in UPPER[32:]]
    file = write_pairs(tmp_path / "words.jsonl", words)
    run = ("--run", tmp_path / "run")
    table = columns(output(capsys, *run, "--baseline", "--text_prompt", "a "))
    assert list(table) == ["tuned", "no prompt", "text 'a '"]
    bare = (
        "--gin.Run.prompt=None",
        "--gin.evaluation/DataSource.template=None",
        "--gin.Prompting.placement='prefix'",
        f"--gin.EVALUATION_FILES={str(file)!r}",
    )
    expected = columns(output(capsys, *run, *bare))["value"]
    assert {m: v.split()[0] for m, v in table["no prompt"].items()} == expected
