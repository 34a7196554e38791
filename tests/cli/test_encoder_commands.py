"""Commands with an encoder, whose head scores classes."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from tests.support.encoder_folders import write_bert
from tests.support.exhaustive import sample
from tests.support.small_runs import write_pairs

WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house")
PAIRS = [(x, "low" if x < "e" else "high") for x in WORDS]
HEAD = ("--head", "first", "--labels", "low", "high")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def arguments(bert, folder, *more):
    train = write_pairs(folder / "pairs.jsonl", PAIRS)
    return [
        *("train", "--model", str(bert), "--train", str(train), "--eval", str(train)),
        *("--out", str(folder / "run"), "--batch_size", "4", "--steps", "3", *more),
    ]


@pytest.fixture(scope="module")
def run(bert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder_run")
    assert main(arguments(bert, folder, *HEAD, "--prompt_length", "4")) == 0
    return folder / "run"


@pytest.mark.slow
def test_evaluate_measures_what_predict_answers(run, capsys):
    tuned = pt.load_tuned(str(run))
    predicted = [tuned.predict(text) for text, _ in PAIRS]
    cost = -np.log(
        [x.probabilities[y] for x, (_, y) in zip(predicted, PAIRS, strict=True)]
    )
    assert tuned.evaluate()["loss"] == pytest.approx(cost.mean(), abs=1e-5)
    assert main(["predict", "apple", "--run", str(run)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["probabilities"] == pytest.approx(predicted[0].probabilities, abs=1e-6)


@pytest.mark.slow
def test_an_adapter_of_peft_has_the_head_and_the_pooler(run, bert, tmp_path, capsys):
    folder = tmp_path / "peft"
    assert main(["convert", str(run), str(folder)]) == 0
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["classifier", "score", "pooler"]
    assert load_file(folder / "adapter_model.safetensors").keys() == {
        "prompt_embeddings",
        *(f"base_model.classifier.{x}" for x in ("weight", "bias")),
        *(f"base_model.bert.pooler.dense.{x}" for x in ("weight", "bias")),
    }
    capsys.readouterr()
    given = ("--model", str(bert), "--prompt", str(folder))
    assert main(["predict", "apple", *given]) == 0
    found = json.loads(capsys.readouterr().out)["probabilities"]
    expected = pt.load_tuned(str(run)).predict("apple").probabilities
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-6)


def test_labels_are_not_ranked_without_a_head(bert):
    model = pt.load(str(bert))
    with pytest.raises(pt.InputError, match="predicts no next tokens"):
        model.predict("apple", labels=["low", "high"])
    with pytest.raises(pt.InputError, match="predicts no next tokens"):
        model.evaluate(PAIRS)


def test_a_text_may_have_all_positions(bert):
    model = pt.load(str(bert))  # of 48 positions, two of them for [CLS] and [SEP]
    longest = "a " * 46
    assert model.embed(longest).shape == (1, 16)
    assert model.attach(pt.ClassHead(labels=["x", "y"])).predict(longest).label
    with pytest.raises(pt.InputError, match="a row of 49 tokens"):
        model.embed(longest + "a")


METHODS = {
    "prefix": (pt.KeyValuePrefix(length=3), "decoder/prompt/"),
    "deep": (pt.DeepPrompt(length=3), "decoder/prompt/"),
    "lora": (pt.LoRA(rank=2), "/adapters/lora/"),
    "ia3": (pt.IA3(), "/adapters/ia3/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(2, list(METHODS)))
def test_every_method_trains_itself_and_the_head_alone(name, bert):
    method, part = METHODS[name]
    model, head = pt.load(str(bert)), pt.ClassHead(labels=["low", "high"])
    before = model.attach(method, head).parameters
    tuned = pt.tune(model, [method, head], PAIRS, steps=6, progress=False)
    changed = [
        path
        for path, array in tuned.parameters.items()
        if path in before and np.any(np.asarray(before[path]) != np.asarray(array))
    ]
    assert any(part in path for path in changed)
    assert all(part in path or path.startswith("head/adapters/") for path in changed)


REFUSED = {
    "generate": (("generate", "a", "--model", "BERT"), "bert is an encoder"),
    "a memory": (
        ("remember", "TEXT", "--model", "BERT", "--out", "OUT"),
        "is an encoder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_encoders_cannot_do_is_refused(name, bert, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a text")
    given = {"BERT": str(bert), "TEXT": str(text), "OUT": str(tmp_path / "out")}
    command, message = REFUSED[name]
    assert main([str(given.get(x, x)) for x in command]) != 0
    assert message in capsys.readouterr().err


UNTRAINABLE = {
    "no head": ((), "predicts no next tokens"),
    "a text": (
        (
            *HEAD,
            "--method",
            "text_prefix",
            "--prompt_text",
            "apple bread",
            "--prompt_length",
            "4",
        ),
        "this is an encoder",
    ),
    "a causal prompt": (
        (*HEAD, "--gin.Prompting.prefix_attention=True"),
        "an encoder's tokens see each other anyway",
    ),
    "packing": ((*HEAD, "--gin.DataSource.packing=True"), "several examples"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused(name, bert, tmp_path, capsys):
    more, message = UNTRAINABLE[name]
    assert main(arguments(bert, tmp_path, *more)) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
