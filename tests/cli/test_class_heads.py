"""Commands with a head that scores classes."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.settings.data_source import DataSource
from tests.support.dummies import LetterTokenizer
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


@pytest.mark.slow
def test_a_new_head_starts_near_chance_and_both_parts_are_trained(run):
    assert logged(run)[0]["loss"] == pytest.approx(np.log(2), abs=0.2)
    tuned = pt.load_tuned(str(run))
    assert tuned.parameters[KERNEL].shape == (2, 16)
    assert (run / "config.gin").read_text().count("head/adamw.learning_rate") == 1


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_texts_is_refused(name, run, capsys):
    command, message = REFUSED[name]
    assert main([str(run) if x == "RUN" else x for x in command]) != 0
    assert message in capsys.readouterr().err


UNTRAINABLE = {
    "a loss of texts": (("--loss", "class_cross_entropy"), "compares or samples texts"),
    "streamed weights": (
        ("--gin.Pretrained.weights='streamed'",),
        "whole model on its devices",
    ),
    "a pipeline": (
        ("--gin.MeshShape.data=-1", "--gin.MeshShape.stage=2"),
        "all layers on each device",
    ),
    "prompt tokens": (("--prompt_loss_weight", "0.5"), "predicts no prompt tokens"),
    "no labels": (("--gin.ClassHead.labels=None",), "give the names of the classes"),
    "other labels": (("--labels", "low", "middle"), "is none of the labels"),
    "a mean of several examples": (
        ("--head", "mean", "--gin.DataSource.packing=True"),
        "puts several examples into a row",
    ),
    "a mean that no vector changes": (
        ("--head", "mean", "--gin.Prompting.placement='suffix'"),
        "do not depend on a prompt that comes after it",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused(name, files, tmp_path, capsys):
    more, message = UNTRAINABLE[name]
    given = arguments(files, tmp_path, "--steps", "1", *more)
    assert main(given) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_labels_are_names():
    with pytest.raises(InputError, match="all different"):
        pt.ClassHead(labels=["yes", "yes "]).build()


def test_an_adapter_of_peft_has_the_head(run, files, tmp_path, capsys):
    folder = tmp_path / "peft"
    assert main(["convert", str(run), str(folder)]) == 0
    assert "next: prompt-tuning predict --model" in capsys.readouterr().out
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert names == {"prompt_embeddings", "base_model.score.weight"}
    capsys.readouterr()
    given = ("--model", str(files.decoder), "--prompt", str(folder))
    assert main(["predict", "apple=", *given]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    expected = pt.load_tuned(str(run)).predict("apple=").probabilities.values()
    found = json.loads(line)["probabilities"]
    assert found == {
        f"LABEL_{i}": pytest.approx(x, abs=1e-6) for i, x in enumerate(expected)
    }


@pytest.fixture
def published(files, tmp_path):
    """A folder with a head, as `AutoModelForSequenceClassification` writes it."""
    folder = shutil.copytree(files.decoder, tmp_path / "published")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"]}
    config |= {"id2label": {"0": "low", "1": "high"}}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = load_file(folder / "model.safetensors")
    arrays["score.weight"] = np.random.default_rng(0).normal(size=(2, 16)).astype("f4")
    save_file(arrays, folder / "model.safetensors")
    return folder


def test_a_published_head_is_read_and_trained_further(published, tmp_path, capsys):
    assert main(["predict", "apple=", "--model", str(published)]) == 0
    line = json.loads(capsys.readouterr().out)
    frozen = pt.load(str(published)).predict("apple=")
    assert line["label"] == frozen.label and set(frozen.probabilities) == {
        "low",
        "high",
    }
    head = pt.load(str(published)).parameters["head/kernel"]
    tuned = pt.load(str(published)).attach(pt.ClassHead())
    np.testing.assert_array_equal(tuned.parameters[KERNEL], head)
    assert tuned.predict("apple=").probabilities == pytest.approx(frozen.probabilities)
    turned = pt.load(str(published)).attach(pt.ClassHead(labels=["high", "low"]))
    np.testing.assert_array_equal(turned.parameters[KERNEL], head[::-1])


def test_a_published_head_scores_the_same_on_a_mesh(published, capsys):
    found = []
    for more in ((), ("--gin.MeshShape.data=4", "--gin.MeshShape.tensor=2")):
        assert main(["predict", "apple=", "--model", str(published), *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["probabilities"])
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_unknown_problems_are_refused(published):
    config = json.loads((published / "config.json").read_text())
    config["problem_type"] = "ranking"
    (published / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="'single_label_classification' or"):
        pt.load(str(published))
    # Transformers has two classes without names then.
    (published / "config.json").write_text(
        json.dumps(config | {"problem_type": None, "id2label": None})
    )
    assert read_config(published).labels == ("LABEL_0", "LABEL_1")
    arrays = load_file(published / "model.safetensors")
    arrays["score.weight"] = np.zeros((), "f4")
    save_file(arrays, published / "model.safetensors")
    with pytest.raises(InputError, match="expected a row for each class"):
        read_config(published)


@pytest.mark.slow
def test_the_mean_of_states_does_not_depend_on_the_rows_of_a_batch(files):
    model = pt.load(str(files.decoder)).attach(
        pt.SoftPrompt(length=3), pt.ClassHead(labels=["low", "high"], pooling="mean")
    )
    # The third row of each batch has no example.
    loss = model.evaluate(PAIRS, batch_size=3)["loss"]
    alone = [model.predict(given).probabilities[label] for given, label in PAIRS]
    assert loss == pytest.approx(-np.log(alone).mean(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["prefix", "suffix"])
def test_examples_that_share_a_row_are_scored_as_if_alone(files, placement):
    model = pt.tune(
        pt.load(str(files.decoder)),
        [pt.SoftPrompt(length=3), pt.ClassHead(labels=["low", "high"])],
        PAIRS,
        prompting=pt.Prompting(placement=placement),
        steps=1,
        progress=False,
    )
    alone = model.evaluate(PAIRS)
    cost = [-np.log(model.predict(given).probabilities[y]) for given, y in PAIRS]
    assert alone["loss"] == pytest.approx(np.mean(cost), abs=1e-5)
    packed = model.evaluate(PAIRS, packing=True, batch_tokens=64)
    assert packed == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_an_encoder_decoder_scores_by_the_end_of_the_text_in_its_decoder(
    files, tmp_path, capsys
):
    train = write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    run, folder = str(tmp_path / "run"), tmp_path / "peft"
    given = ("--model", str(files.t5), "--train", str(train), "--eval", str(train))
    more = ("--method", "lora", "--head", "last", "--labels", "low", "high")
    rest = ("--steps", "2", "--batch_size", "3", "--out", run)
    assert main(["train", *given, *more, *rest]) == 0
    tuned = pt.load_tuned(run)
    alone = [tuned.predict(x).probabilities[label] for x, label in PAIRS]
    metrics = tuned.evaluate(batch_size=3)
    assert metrics["loss"] == pytest.approx(-np.log(alone).mean(), abs=1e-5)
    packed = tuned.evaluate(packing=True, batch_tokens=64)
    assert packed == pytest.approx(metrics, abs=1e-5)
    assert main(["convert", run, str(folder)]) == 0
    saved = json.loads((folder / "adapter_config.json").read_text())["modules_to_save"]
    assert saved == ["classifier", "score", "classification_head"]
    capsys.readouterr()
    again = ("--model", str(files.t5), "--prompt", str(folder))
    assert main(["predict", PAIRS[0][0], *again]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["probabilities"]["LABEL_0"] == pytest.approx(
        alone[0], abs=1e-6
    )


def test_a_class_is_no_token_of_its_row(files, tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl", [("abcde", "high")])
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=["low", "high"]))
    tokens = encode_prompt(model.tokenizer, "abcde")
    interface = dataclasses.replace(
        model.prompted.interface, maximum_length=len(tokens)
    )
    (example,) = load_examples(DataSource(files=[str(path)]), interface)
    assert example.inputs.tolist() == tokens
    assert example.targets[-1] == 1 and example.weights[-1] == 1


@pytest.mark.parametrize("cut", ["truncate_left", "truncate_right"])
def test_a_text_that_is_cut_keeps_its_class(files, tmp_path, cut):
    path = write_pairs(tmp_path / "pairs.jsonl", [("abcde", "high")])
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=["low", "high"]))
    tokens = encode_prompt(model.tokenizer, "abcde")
    interface = dataclasses.replace(model.prompted.interface, maximum_length=3)
    source = DataSource(files=[str(path)], on_too_long=cut)
    (example,) = load_examples(source, interface)
    begin = interface.begin_length(tokens)
    kept = (
        tokens[:3] if cut == "truncate_right" else tokens[:begin] + tokens[begin - 3 :]
    )
    assert example.inputs.tolist() == kept
    assert example.targets.tolist()[-1] == 1 and np.count_nonzero(example.weights) == 1


def test_a_class_has_the_number_of_its_completion_in_a_column(files, tmp_path):
    path = tmp_path / "costs.jsonl"
    record = {"prompt": "ab", "completion": "low", "cost": 3}
    path.write_text(f"{json.dumps(record)}\n")
    model = pt.load(str(files.decoder)).attach(pt.ClassHead(labels=["low", "high"]))
    source = DataSource(files=[str(path)], columns={"costs": "cost"})
    example = load_examples(source, model.prompted.interface)[0]
    assert example.weights.tolist()[-1] == 1
    assert example.columns["costs"].tolist()[-1] == 3
    assert len(example.columns["costs"]) == len(example.targets)


def test_labels_that_the_tokenizer_cannot_tell_apart_are_refused(tmp_path):
    model = ModelInterface(
        architecture="decoder_only",
        vocabulary_size=26,
        tokenizer=LetterTokenizer(),
        labels=("no one", "noone"),
    )
    path = write_pairs(tmp_path / "pairs.jsonl", [("abc", "noone")])
    with pytest.raises(InputError, match="expected different texts"):
        load_examples(DataSource(files=[str(path)], add_eos=False), model)
