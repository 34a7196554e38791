"""Commands with a head that scores classes."""

import json

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from tests.support.small_runs import logged, write_pairs

WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house")
PAIRS = [(f"{x}=", "low" if x < "e" else "high") for x in WORDS]
KERNEL = "head/adapters/classes/kernel"


def arguments(files, folder, *more):
    train = write_pairs(folder / "pairs.jsonl", PAIRS)
    return [
        *("train", "--model", str(files.decoder), "--train", str(train)),
        *("--eval", str(train), "--out", str(folder / "run"), "--batch_size", "3"),
        *("--head", "last", "--labels", "low", "high", "--log_every", "1"),
        *("--gin.Run.keep_best=None", *more),
    ]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert main(arguments(files, folder, "--steps", "4")) == 0
    return folder / "run"


def test_a_new_head_starts_near_chance_and_both_parts_are_trained(run):
    assert logged(run)[0]["loss"] == pytest.approx(np.log(2), abs=0.2)
    tuned = pt.load_tuned(str(run))
    assert tuned.parameters[KERNEL].shape == (2, 16)
    assert (run / "config.gin").read_text().count("head/adamw.learning_rate") == 1


def test_a_resumed_run_equals_one_without_a_break(run, files, tmp_path):
    given = arguments(files, tmp_path)
    assert main([*given, "--steps", "2"]) == 0
    assert main([*given, "--steps", "4"]) == 0
    whole, resumed = (pt.load_tuned(str(x)) for x in (run, tmp_path / "run"))
    for path, array in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[path], array)


def test_the_command_and_python_give_the_same_probabilities(run, capsys):
    assert main(["predict", "apple=", "kiwi=", "--run", str(run)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    predicted = pt.load_tuned(str(run)).predict(["apple=", "kiwi="])
    for line, one in zip(lines, predicted, strict=True):
        assert line["label"] == one.label
        assert line["probabilities"] == pytest.approx(one.probabilities, abs=1e-6)
        assert sum(one.probabilities.values()) == pytest.approx(1)


def test_evaluate_measures_classes_by_what_predict_answers(run, tmp_path, capsys):
    file = tmp_path / "predictions.jsonl"
    assert main(["evaluate", "--run", str(run), "--predictions", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    predicted = pt.load_tuned(str(run)).predict([prompt for prompt, _ in PAIRS])
    assert [line["target"] for line in lines] == [label for _, label in PAIRS]
    assert [line["label"] for line in lines] == [one.label for one in predicted]
    cost = -np.log(
        [x.probabilities[y] for x, (_, y) in zip(predicted, PAIRS, strict=True)]
    )
    metrics = pt.load_tuned(str(run)).evaluate()
    assert metrics["loss"] == pytest.approx(cost.mean(), abs=1e-5)
    right = [
        one.label == label for one, (_, label) in zip(predicted, PAIRS, strict=True)
    ]
    assert metrics["accuracy"] == metrics["label_accuracy"] == np.mean(right)


def test_a_sweep_trains_the_member_that_is_trained_alone(run, files, tmp_path):
    given = arguments(files, tmp_path, "--steps", "4")
    given[given.index("--out") + 1] = str(tmp_path / "sweep")
    assert main(["sweep", *given[1:], "--vary", "prompt_length=20,5"]) == 0
    alone = pt.load_tuned(str(run))
    (member,) = tmp_path.glob("sweep/*20*")
    swept = pt.load_tuned(str(member))
    np.testing.assert_allclose(
        swept.parameters[KERNEL], alone.parameters[KERNEL], rtol=1e-5, atol=1e-6
    )


REFUSED = {
    "generate": (("generate", "a=", "--run", "RUN"), "generates no text"),
    "exact match": (("evaluate", "--run", "RUN", "--exact_match"), "no text"),
    "baseline": (("evaluate", "--run", "RUN", "--baseline"), "no class head"),
    "labels": (("predict", "a=", "--run", "RUN", "--labels", "a", "b"), "head scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_texts_is_refused(name, run, capsys):
    command, message = REFUSED[name]
    assert main([str(run) if x == "RUN" else x for x in command]) != 0
    assert message in capsys.readouterr().err


UNTRAINABLE = {
    "a loss of texts": (("--loss", "class_cross_entropy"), "compares or samples texts"),
    "a mesh": (("--gin.MeshShape.data=1",), "whole model on one device"),
    "no labels": (("--gin.ClassHead.labels=None",), "give the names of the classes"),
    "other labels": (("--labels", "low", "middle"), "is none of the labels"),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused(name, files, tmp_path, capsys):
    more, message = UNTRAINABLE[name]
    assert main(arguments(files, tmp_path, *more)) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_labels_are_names():
    with pytest.raises(InputError, match="all different"):
        pt.ClassHead(labels=["yes", "yes "]).build()
