"""Tables, JSON lists and parquet files have the rows of the same lines as jsonl."""

import csv
import json
import sys

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.data_source import DataSource
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows import parquet_files
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.prepared_files import write_jsonl
from tests.support.small_tokenizer import CHAT, write_tokenizer

LINES = [
    {"prompt": "a, b\n", "completion": 'say "the"', "weight": 1.5, "task": 1},
    {"prompt": "é 中", "completion": "the", "weight": 2, "task": 0},
]
SETTINGS = {"example_weight_key": "weight", "balance_key": "task"}


def write_table(path, delimiter):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(LINES[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(LINES)


def write_parquet(path, lines):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(lines), path)
    return path


def load(folder, path, **settings):
    model = ModelInterface(
        architecture="decoder_only",
        vocabulary_size=262,
        tokenizer=load_tokenizer(folder),
    )
    return load_examples(DataSource(files=str(path), **settings), model)


def content(examples):
    rows = map(examples.__getitem__, range(len(examples)))
    return [(row.inputs.tolist(), row.weights.tolist()) for row in rows]


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "parquet", "BOM.jsonl"])
def test_all_kinds_have_the_same_rows(tmp_path, folder, kind):
    expected = load(folder, write_jsonl(tmp_path / "a.jsonl", *LINES), **SETTINGS)
    path = tmp_path / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps(LINES), encoding="utf-8-sig")
    elif kind == "parquet":
        write_parquet(path, LINES)
    elif kind == "BOM.jsonl":
        lines = "".join(json.dumps(line) + "\n" for line in LINES)
        path.write_text(lines, encoding="utf-8-sig")
    else:
        write_table(path, "," if kind == "csv" else "\t")
    assert content(load(folder, path, **SETTINGS)) == content(expected)


def test_messages_in_parquet(tmp_path, folder):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"messages": talk}] * 300
    expected = load(folder, write_jsonl(tmp_path / "a.jsonl", *lines))
    rows = load(folder, write_parquet(tmp_path / "a.parquet", lines))
    assert content(rows) == content(expected)
    assert rows.rows.describe(299) == f"{tmp_path / 'a.parquet'}, row 299"


def test_columns_of_bytes_are_left_out(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"image": b"x", "prompt": "y"}])
    assert [record.content for record in read_records(path)] == [{"prompt": "y"}]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"pip install 'prompt-tuning\[parquet\]'"):
        list(read_records(tmp_path / "a.parquet"))


def test_parquet_has_limits(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", LINES)
    monkeypatch.setattr(parquet_files, "MAXIMUM_ROWS", 1)
    with pytest.raises(InputError, match="has 2 rows, expected at most 1"):
        list(read_records(path))
    monkeypatch.setattr(parquet_files, "MAXIMUM_ROWS", 2)
    monkeypatch.setattr(parquet_files, "MAXIMUM_BATCH", 1)
    with pytest.raises(InputError, match=r"2 rows from row 0 have .* bytes, expected"):
        list(read_records(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot be read as parquet"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty, expected at least one record"),
        ("a.csv", "prompt,prompt\n", "expected a unique name for each"),
        ("a.csv", "p,c\n1,2\n1\n", "a.csv, line 3: 1 cells, expected 2, one for each"),
        ("a.csv", 'p,c\n1,"2\n', "line 2: a quote is opened and never closed; write a"),
        ("a.tsv", "p\tc\n\xe9", "a.tsv, line 2: 1 cells"),
        ("a.json", '{"prompt": "a"}', "contains an object, expected a list of objects"),
        ("a.json", "[1]", "item 1: found a whole number, expected an object whose"),
        ("a.json", "[", "is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: found a list, expected an object"),
        ("a.jsonl", "\ufeff\n\n", "line 1 is not valid JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_records(path))


def test_utf_16_is_recognized(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\n", encoding="utf-16")
    with pytest.raises(InputError, match="byte order mark of UTF-16, expected UTF-8"):
        list(read_records(path))
