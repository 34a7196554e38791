"""Records of a rated answer, in the forms of published data."""

import csv

import pytest

from prompt_tuning.data.examples.rated_examples import load_ratings
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.settings.data_source import DataSource
from tests.support.chat_records import answer, user
from tests.support.prepared_files import write_jsonl
from tests.support.small_tokenizer import CHAT, write_tokenizer


def ratings(tmp_path, file):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    model = ModelInterface(
        architecture="decoder_only",
        vocabulary_size=262,
        tokenizer=load_tokenizer(folder),
    )
    return load_ratings(DataSource(files=str(file)), model).gold.tolist()


@pytest.mark.parametrize(
    "records",
    [
        # TRL's unpaired preferences.
        [{"prompt": [user("a")], "completion": [answer(x)]} for x in "bc"],
        [{"messages": [user("a"), answer(x)]} for x in "bc"],
        [{"prompt": "a", "completion": x} for x in "bc"],
    ],
    ids=["conversations", "messages", "texts"],
)
def test_answers_are_rated_by_their_label(tmp_path, records):
    labels = True, False
    rated = [{**x, "label": label} for x, label in zip(records, labels, strict=True)]
    assert ratings(tmp_path, write_jsonl(tmp_path / "rated.jsonl", *rated)) == [1, 0]


@pytest.mark.parametrize("labels", [("True", "False"), ("true", "FALSE"), ("1", "0")])
def test_labels_of_tables_are_read(tmp_path, labels):
    file = tmp_path / "rated.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "completion", "label"])
        writer.writerows(["a", "b", label] for label in labels)
    assert ratings(tmp_path, file) == [1, 0]
