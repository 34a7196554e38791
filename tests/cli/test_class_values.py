"""Heads of classes for several labels of a text, and for numbers."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.evaluation.metric_sums import label_set_metrics, number_metrics
from prompt_tuning.settings.data_source import DataSource
from tests.support.small_runs import logged

WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame")
LABELS = ["low", "vowel", "long"]
SETS = [["low", "vowel"], ["low"], [0], [], [1, 2], [0.0, 0.0, 1.0]]
HOT = [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 1]]
NUMBERS = [1.5, -0.25, 0, 2, 3.5, -1]


def write(path, completions):
    records = zip(WORDS, completions, strict=True)
    lines = [json.dumps({"prompt": x, "completion": y}) for x, y in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def run_of(files, folder, completions, *more):
    data = str(write(folder / "data.jsonl", completions))
    given = ("--model", str(files.decoder), "--train", data, "--eval", data)
    rest = ("--steps", "3", "--batch_size", "3", "--head", "last", "--log_every", "1")
    assert main(["train", *given, "--out", str(folder / "run"), *rest, *more]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def regression(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("regression")
    return run_of(files, folder, NUMBERS, "--problem", "regression")


@pytest.fixture(scope="module")
def several(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    more = ("--problem", "multi_label", "--labels", *LABELS)
    return run_of(files, folder, SETS, *more)


@pytest.mark.slow
def test_a_regression_is_measured_by_its_numbers(regression, capsys):
    tuned = pt.load_tuned(str(regression))
    values = [one.values["value"] for one in tuned.predict(list(WORDS))]
    metrics = tuned.evaluate()
    assert set(metrics) == {"loss", "mse", "pearson", "spearman"}
    error = np.square(np.subtract(values, NUMBERS)).mean()
    assert metrics["loss"] == pytest.approx(error, rel=1e-5)
    assert metrics["mse"] == pytest.approx(error, rel=1e-5)
    pearson, spearman = (
        f(values, NUMBERS)[0] for f in (stats.pearsonr, stats.spearmanr)
    )
    assert metrics["pearson"] == pytest.approx(pearson, abs=1e-6)
    assert metrics["spearman"] == pytest.approx(spearman, abs=1e-6)
    assert "accuracy" not in logged(regression)[0]
    assert main(["predict", "apple", "--run", str(regression)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["values"] == {"value": pytest.approx(values[0], abs=1e-5)}


@pytest.mark.slow
def test_an_evaluation_measures_what_the_numbers_of_a_head_have(
    regression, several, tmp_path
):
    file = tmp_path / "predictions.jsonl"
    for run, names in (
        (regression, {"loss", "mse"}),
        (several, {"loss", "accuracy", "label_accuracy"}),
    ):
        given = ["--run", str(run), "--predictions", str(file), "--force"]
        assert main(["evaluate", *given]) == 0
        lines = file.read_text().splitlines()
        assert set(json.loads(lines[0])["scores"]) == names
        with pytest.raises(pt.InputError, match="does not choose one class"):
            pt.load_tuned(str(run)).evaluate(metrics=["perplexity"])


@pytest.mark.slow
def test_several_labels_are_measured_by_each(several, tmp_path):
    tuned = pt.load_tuned(str(several))
    predicted = tuned.predict(list(WORDS))
    shares = np.array([list(one.probabilities.values()) for one in predicted])
    hot = np.array(HOT)
    metrics = tuned.evaluate()
    cost = -np.log(np.where(hot, shares, 1 - shares)).mean()
    assert metrics["loss"] == pytest.approx(cost, rel=1e-5)
    chosen = shares > 0.5
    assert [one.labels for one in predicted] == [
        [name for name, each in zip(LABELS, row, strict=True) if each] for row in chosen
    ]
    assert metrics["label_accuracy"] == np.mean((chosen == hot).all(1))
    f1 = 2 * (chosen & (hot == 1)).sum() / (chosen.sum() + hot.sum())
    assert metrics["label_micro_f1"] == pytest.approx(f1)
    file = tmp_path / "predictions.jsonl"
    assert main(["evaluate", "--run", str(several), "--predictions", str(file)]) == 0
    first = json.loads(file.read_text().splitlines()[0])
    assert first["target"] == "low, vowel"


def test_metrics_are_finite_where_examples_do_not_differ():
    ones, none = np.ones((3, 1)), np.zeros((3, 2), bool)
    metrics = number_metrics(np.array([[1.0], [2.0], [4.0]]), ones)
    metrics |= label_set_metrics(none, none, "label")
    found = {name: metric.value for name, metric in metrics.items()}
    assert found["pearson"] == found["spearman"] == 0
    assert found["label_micro_f1"] == found["label_macro_f1"] == 0


def test_labels_and_numbers_are_read_in_their_forms(files, tmp_path):
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=LABELS))
    for problem, given, expected in (
        ("multi_label", SETS, HOT),
        ("regression", [[x, 2, 3] for x in NUMBERS], [[x, 2, 3] for x in NUMBERS]),
    ):
        path = write(tmp_path / f"{problem}.jsonl", given)
        interface = dataclasses.replace(model.prompted.interface, problem=problem)
        examples = load_examples(DataSource(files=[str(path)]), interface)
        found = [
            [examples[i].columns[f"class_value_{c}"][-1] for c in range(3)]
            for i in range(len(examples))
        ]
        assert found == expected


def test_tables_have_labels_with_commas_and_numbers_as_texts(files, tmp_path):
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=LABELS))
    path = tmp_path / "table.csv"
    path.write_text('prompt,completion\nab,"low, long"\ncd,vowel\n')
    interface = dataclasses.replace(model.prompted.interface, problem="multi_label")
    first, second = load_examples(DataSource(files=[str(path)]), interface)
    assert [first.columns[f"class_value_{c}"][-1] for c in range(3)] == [1, 0, 1]
    assert [second.columns[f"class_value_{c}"][-1] for c in range(3)] == [0, 1, 0]


WRONG = {
    "an unknown label": ("multi_label", ["high"], "some of the labels"),
    "a number of no class": ("multi_label", [3], "some of the labels"),
    "ones and zeros": ("multi_label", [1, 0, 0], r"write floats, .*1\.0, 0\.0, 0\.0"),
    "a text": ("regression", "much", "expected a list of 3 numbers"),
    "too few numbers": ("regression", [1, 2], "expected a list of 3 numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_completions_that_do_not_fit_are_refused(name, files, tmp_path):
    problem, given, message = WRONG[name]
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=LABELS))
    interface = dataclasses.replace(model.prompted.interface, problem=problem)
    path = write(tmp_path / "data.jsonl", [given] * len(WORDS))
    with pytest.raises(pt.InputError, match=f"line 1: .*{message}"):
        load_examples(DataSource(files=[str(path)]), interface)
