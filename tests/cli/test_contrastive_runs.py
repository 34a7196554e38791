"""Runs that tune vectors of texts, of encoders and of decoders."""

import codecs
import json

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from tests.support.encoder_folders import write_bert

WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house")
SECRETS = [codecs.encode(word, "rot13") for word in WORDS]
RECORDS = [
    {"query": x, "positive": y, "negatives": [other]}
    for x, y, other in zip(WORDS, SECRETS, SECRETS[1:] + SECRETS[:1], strict=True)
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


def write_records(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def expected_metrics(model):
    """Returns what ranking the vectors of `embed` gives."""
    queries = model.embed([x["query"] for x in RECORDS])
    # Each negative is also a positive, and equal texts count once.
    scores = queries @ model.embed(SECRETS).T
    own = scores.diagonal()
    ranks = np.sum(scores >= own[:, None] - 1e-6, axis=1)
    loss = np.log(np.exp(scores / 0.05).sum(1)) - own / 0.05
    return {"loss": loss.mean(), "recall_at_1": (ranks == 1).mean()} | {
        "mrr": (1 / ranks).mean()
    }


@pytest.mark.slow
def test_vectors_of_an_encoder_are_tuned_and_measured(bert, tmp_path, capsys):
    data, run = write_records(tmp_path / "pairs.jsonl", RECORDS), tmp_path / "run"
    given = [
        *("train", "--model", str(bert), "--train", data, "--eval", data),
        *("--out", str(run), "--loss", "contrastive", "--method", "lora"),
        *("--batch_size", "8", "--steps", "60", "--learning_rate", "0.01"),
    ]
    assert main(given) == 0
    tuned = pt.load_tuned(str(run))
    measured = tuned.evaluate()
    assert measured == pytest.approx(expected_metrics(tuned), abs=1e-4)
    assert measured["recall_at_1"] > 0.8
    capsys.readouterr()
    assert main(["evaluate", "--run", str(run), "--baseline"]) == 0
    shown = capsys.readouterr().out
    assert "recall_at_1" in shown and "mrr" in shown
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert "recall_at_1" in page.read_text()


@pytest.mark.slow
def test_a_prompt_tunes_the_vectors_of_a_decoder():
    model = pt.load("bundled:skills-decoder")
    tuned = pt.tune(
        model,
        pt.SoftPrompt(length=3),
        RECORDS,
        objective=pt.Contrastive(),
        steps=2,
        progress=False,
    )
    assert tuned.evaluate(RECORDS) == pytest.approx(expected_metrics(tuned), abs=1e-4)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"query": "a"}], "line 1 has the keys .*expected 'query' or"),
        ([RECORDS[0], {"query": "a", "positive": "b"}], "line 2 has 0 negatives, exp"),
        (
            [RECORDS[0], {"query": "a", "positive": ""}],
            "line 2: 'positive' has '', exp",
        ),
        ([RECORDS[0] | {"negatives": ["b", 3]}], "line 1: 'negatives' has 3, expected"),
        ([{"query": "a", "positive": "b"}], "1 example without negatives, so the loss"),
        ([{"anchor": "a " * 999, "positive": "b"}], "has 1001 tokens, but .* at most"),
    ],
)
def test_records_that_cannot_be_compared_are_refused(bert, records, message, tmp_path):
    file = write_records(tmp_path / "pairs.jsonl", records)
    given = {"objective": pt.Contrastive(), "steps": 1, "progress": False}
    with pytest.raises(pt.InputError, match=message):
        pt.tune(pt.load(str(bert)), pt.LoRA(rank=2), file, **given)


@pytest.mark.parametrize(
    ("setting", "value"), [("template", "{soft:2}{query}"), ("balance_key", "query")]
)
def test_settings_without_an_effect_on_the_texts_are_refused(setting, value, tmp_path):
    file = write_records(tmp_path / "pairs.jsonl", RECORDS)
    data = pt.DataSource(files=file, **{setting: value})
    with pytest.raises(pt.InputError, match=f"{setting} is .* which has no effect"):
        pt.tune(
            pt.load("bundled:skills-decoder"),
            pt.SoftPrompt(length=2),
            data,
            objective=pt.Contrastive(),
            steps=1,
            progress=False,
        )
