"""Heads that tag the words of texts, from data to predictions."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.rows.word_rows import encode_words
from prompt_tuning.evaluation.tag_measure import entities, entity_metrics
from prompt_tuning.settings.data_source import DataSource

LABELS = ["O", "B-PER", "I-PER"]
WEIGHTS = "model.safetensors"
RECORDS = [
    {"tokens": ["ann", "lee", "saw", "bob"], "tags": ["B-PER", "I-PER", "O", "B-PER"]},
    {"tokens": ["so", "it", "goes"], "tags": ["O", "O", None]},
    {"tokens": ["bob"], "tags": ["B-PER"]},
]


def write(path, records=RECORDS):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def head(files):
    head = pt.ClassHead(labels=LABELS, problem="tokens")
    return pt.load(str(files.decoder)).attach(pt.SoftPrompt(length=2), head)


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = write(folder / "words.jsonl")
    given = ("--model", str(files.decoder), "--train", data, "--eval", data)
    more = ("--method", "lora", "--head", "last", "--problem", "tokens", "--labels")
    rest = ("--steps", "3", "--batch_size", "2", "--log_every", "1")
    out = ("--out", str(folder / "run"))
    assert main(["train", *given, *more, *LABELS, *rest, *out]) == 0
    return folder / "run"


def examples_of(model, path, **settings):
    return load_examples(DataSource(files=[path], **settings), model.prompted.interface)


def test_the_first_token_of_each_word_has_its_tag(head, tmp_path):
    (first, second, _) = examples_of(head, write(tmp_path / "words.jsonl"))
    pieces = encode_words(head.tokenizer, RECORDS[0]["tokens"])
    begin = len(head.tokenizer.begin_ids)
    starts = begin + np.cumsum([0, *map(len, pieces[:-1])])
    assert first.inputs.tolist() == [
        *head.tokenizer.begin_ids,
        *itertools.chain(*pieces),
    ]
    assert np.flatnonzero(first.weights).tolist() == starts.tolist()
    assert first.targets[starts].tolist() == [1, 2, 0, 1]
    assert np.count_nonzero(second.weights) == 2


FORMS = {
    "names": (["a", "b"], ["O", "I-PER"]),
    "numbers": (["a", "b"], [0, 2]),
    "texts of a table": ("a b", "O I-PER"),
}


@pytest.mark.parametrize("form", FORMS)
def test_words_and_tags_are_read_in_their_forms(form, head, tmp_path):
    words, tags = FORMS[form]
    data = write(tmp_path / "data.jsonl", [{"tokens": words, "ner_tags": tags}])
    (example,) = examples_of(head, data)
    assert example.targets[example.weights != 0].tolist() == [0, 2]


WRONG = {
    "an unknown tag": ({"tokens": ["a"], "tags": ["B-LOC"]}, "expected one of the"),
    "a number of no class": ({"tokens": ["a"], "tags": [3]}, "expected one of the"),
    "fewer tags": ({"tokens": ["a", "b"], "tags": ["O"]}, "2 words and 1 tags"),
    "no words": ({"tags": ["O"]}, "expected 'tokens' or 'words'"),
    "no list": ({"tokens": 3, "tags": ["O"]}, "expected a list of words"),
}


@pytest.mark.parametrize("name", WRONG)
def test_words_that_do_not_fit_are_refused(name, head, tmp_path):
    record, message = WRONG[name]
    path = write(tmp_path / "data.jsonl", [RECORDS[0], record])
    with pytest.raises(pt.InputError, match=f"line 2: .*{message}"):
        examples_of(head, path)


UNREAD = {"chat": True, "joiner": " ", "format": "messages", "task_token": "index"}


@pytest.mark.parametrize("name", UNREAD)
def test_settings_that_words_do_not_have_are_refused(name, head, tmp_path):
    data = write(tmp_path / "data.jsonl")
    with pytest.raises(pt.InputError, match=f"DataSource.{name} is .*leave it out"):
        examples_of(head, data, **{name: UNREAD[name]})


def test_inputs_that_cannot_be_tagged_are_named(head):
    for words, message in (("a " * 70, "row of 71 tokens"), ("\u2603", "encoded")):
        with pytest.raises(pt.InputError, match=f"line 2: .*{message}"):
            head.predict(["", words])


def test_words_without_tokens_have_no_tag(head):
    (answer,) = head.predict([{"tokens": ["", ""]}])
    assert answer.tags == [None, None] and answer.probabilities == [0, 0]


@pytest.mark.parametrize("cut_off", ["truncate_left", "truncate_right"])
def test_words_that_are_cut_keep_their_tags(cut_off, head, tmp_path):
    data = write(tmp_path / "data.jsonl", RECORDS[:1])
    (whole,) = examples_of(head, data)
    begin = len(head.tokenizer.begin_ids)
    short = dataclasses.replace(head.prompted.interface, maximum_length=begin + 4)
    source = DataSource(files=[data], on_too_long=cut_off)
    (cut,) = load_examples(source, short)
    kept = slice(begin, begin + 4) if cut_off == "truncate_right" else slice(-4, None)
    assert cut.targets[begin:].tolist() == whole.targets[kept].tolist()
    assert cut.weights[begin:].tolist() == whole.weights[kept].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["prefix", "after_bos"])
def test_loss_predictions_and_packed_rows_agree(placement, files):
    words = [(x["tokens"], x["tags"]) for x in RECORDS]
    model = pt.tune(
        pt.load(str(files.decoder)),
        [pt.SoftPrompt(length=3), pt.ClassHead(labels=LABELS, problem="tokens")],
        words,
        prompting=pt.Prompting(placement=placement),
        steps=1,
        progress=False,
    )
    tags = [tag for _, each in words for tag in each]
    found = model.predict([{"tokens": given} for given, _ in words])
    answers = [tag for each in found for tag in each.tags]
    right = [a == b for a, b in zip(answers, tags, strict=True) if b is not None]
    metrics = model.evaluate(words, batch_size=2)
    assert metrics["accuracy"] == pytest.approx(np.mean(right))
    packed = model.evaluate(words, packing=True, batch_tokens=64)
    assert packed == pytest.approx(metrics, abs=1e-5)


@pytest.mark.slow
def test_commands_train_predict_evaluate_and_convert(run, files, tmp_path, capsys):
    tuned = pt.load_tuned(str(run))
    text = "ann lee saw bob"
    assert main(["predict", text, "--run", str(run)]) == 0
    line = json.loads(capsys.readouterr().out)
    predicted = tuned.predict(text)
    assert line["input"] == text and line["words"] == text.split()
    assert line["tags"] == predicted.tags
    assert line["probabilities"] == pytest.approx(predicted.probabilities, abs=1e-5)
    file = tmp_path / "predictions.jsonl"
    assert main(["evaluate", "--run", str(run), "--predictions", str(file)]) == 0
    first = json.loads(file.read_text().splitlines()[0])
    assert first["target"] == "B-PER I-PER O B-PER"
    assert first["tags"] == predicted.tags
    folder = tmp_path / "peft"
    assert main(["convert", str(run), str(folder)]) == 0
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["task_type"] == "TOKEN_CLS"
    names = load_file(folder / "adapter_model.safetensors").keys()
    start = "base_model.model.score."
    assert {f"{start}weight", f"{start}bias"} <= names
    capsys.readouterr()
    given = ("--model", str(files.decoder), "--prompt", str(folder))
    assert main(["predict", text, *given]) == 0
    (again,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert again["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)
    numbers = [f"LABEL_{LABELS.index(tag)}" for tag in predicted.tags]
    assert again["tags"] == numbers


@pytest.mark.slow
def test_the_best_checkpoint_is_that_of_the_best_f1(run):
    assert pt.load_tuned(str(run)).run.best_by == ("entity_f1", "max")


def test_the_problem_of_a_published_head_is_asked_for(files, tmp_path, capsys):
    folder = shutil.copytree(files.decoder, tmp_path / "published")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForTokenClassification"]
    config["id2label"] = {str(i): label for i, label in enumerate(LABELS)}
    (folder / "config.json").write_text(json.dumps(config))
    (weights,) = folder.glob("*.safetensors")
    head = {"score.weight": np.ones((3, 16), "f4"), "score.bias": np.zeros(3, "f4")}
    save_file(load_file(weights) | head, weights)
    data = write(tmp_path / "words.jsonl")
    given = ("train", "--model", str(folder), "--train", data, "--eval", data)
    more = ("--method", "lora", "--head", "last", "--labels", *LABELS, "--dry_run")
    assert main([*given, *more]) == 2
    assert "give --problem tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_and_a_resumed_run_have_tags(run, files, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert "entity_f1" in page.read_text()
    assert main(["verify", str(run)]) == 0


def test_a_prompt_after_the_text_is_refused(files):
    with pytest.raises(pt.InputError, match="comes after it"):
        pt.tune(
            pt.load(str(files.decoder)),
            [pt.SoftPrompt(length=3), pt.ClassHead(labels=LABELS, problem="tokens")],
            [(["a"], ["O"])],
            prompting=pt.Prompting(placement="suffix"),
            progress=False,
        )


# The example in the documentation of seqeval, and rules of the script conlleval.
GOLD = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
GIVEN = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], GOLD[1]]
SPANS = {
    "B-A I-A O B-B": [(0, 2, "A"), (3, 4, "B")],
    "B-A B-A I-A": [(0, 1, "A"), (1, 3, "A")],
    "I-A I-A I-B": [(0, 2, "A"), (2, 3, "B")],
    "O B-A I-B": [(1, 2, "A"), (2, 3, "B")],
    "O O": [],
}


def test_f1_of_entities_is_that_of_seqeval():
    metrics = entity_metrics(GOLD, GIVEN)
    assert {name: each.value for name, each in metrics.items()} == {
        "entity_precision": 0.5,
        "entity_recall": 0.5,
        "entity_f1": 0.5,
    }
    none = entity_metrics([["O"]], [["O"]])
    assert [metric.value for metric in none.values()] == [0, 0, 0]


@pytest.mark.parametrize("tags", SPANS)
def test_entities_begin_and_end_as_in_conlleval(tags):
    assert [*entities(tags.split())] == SPANS[tags]


@pytest.mark.slow
def test_the_encoder_of_a_t5_tags_words_and_merges(files, tmp_path):
    data = write(tmp_path / "words.jsonl")
    base, run, merged = str(files.t5), str(tmp_path / "run"), tmp_path / "merged"
    head = ("--head", "last", "--problem", "tokens", "--labels", *LABELS)
    given = ("--model", base, "--train", data, "--eval", data, "--method", "lora")
    rest = ("--steps", "20", "--batch_size", "3", "--learning_rate", "0.03")
    assert main(["train", *given, *head, *rest, "--out", run]) == 0
    tuned = pt.load_tuned(run)
    assert tuned.evaluate(data)["accuracy"] > 0.9
    assert main(["convert", run, str(merged), "--merge", "--only", "LORA"]) == 0
    before, after = load_file(files.t5 / WEIGHTS), load_file(merged / WEIGHTS)
    changed = {x for x in before if not np.array_equal(before[x], after[x])}
    assert changed and all(name.startswith("encoder.") for name in changed)
    assert main(["convert", run, str(tmp_path / "peft")]) == 0
    again = pt.load_tuned(tmp_path / "peft", base=base).predict(["ann lee"])
    expected = tuned.predict(["ann lee"])[0].probabilities
    np.testing.assert_allclose(again[0].probabilities, expected, atol=1e-5)
