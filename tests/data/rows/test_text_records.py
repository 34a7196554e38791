"""Tables, JSON lists and parquet files have the rows of the same lines as jsonl."""

import csv
import gzip
import json
import sys

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.rows import compressed_files, parquet_files
from prompt_tuning.data.rows.text_records import read_records
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.settings.data_source import DataSource
from tests.support.prepared_files import write_jsonl
from tests.support.small_tokenizer import CHAT, write_tokenizer

LINES = [
    {"prompt": "a, b\n", "completion": 'say "the"', "weight": 1.5, "task": 1},
    {"prompt": "é 中", "completion": "the", "weight": 2, "task": 0},
]
SETTINGS = {"example_weight_key": "weight", "balance_key": "task"}


def write_table(path, delimiter, before=0, after=0):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        # pandas writes the numbers of the rows in columns without a name.
        writer.writerow([*[""] * before, *LINES[0], *[""] * after])
        for number, line in enumerate(LINES):
            writer.writerow([*[number] * before, *line.values(), *[""] * after])


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


def write_kind(path, kind):
    """Writes `LINES` as one of `KINDS`."""
    if kind in ("parquet", "BOM.jsonl", "ndjson", "lines.json"):
        if kind == "parquet":
            write_parquet(path, LINES)
        else:
            lines = "".join(json.dumps(line) + "\n" for line in LINES)
            path.write_text(lines, encoding="utf-8-sig")
        return
    columns = {key: [line[key] for line in LINES] for key in LINES[0]}
    numbered = {key: dict(enumerate(column)) for key, column in columns.items()}
    contents = {"json": LINES, "lists.json": columns, "pandas.json": numbered}
    if kind in contents:
        path.write_text(json.dumps(contents[kind]), encoding="utf-8-sig")
    elif kind.endswith(".gz"):
        plain = path.with_suffix("")
        write_kind(plain, kind.removesuffix(".gz"))
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        delimiters = {"tsv": "\t", "tabs.csv": "\t", "semicolon.csv": ";"}
        unnamed = {"index.csv": (1, 0), "two.csv": (2, 0), "after.csv": (0, 2)}
        write_table(path, delimiters.get(kind, ","), *unnamed.get(kind, ()))


KINDS = (
    *("csv", "tsv", "json", "parquet", "BOM.jsonl", "index.csv", "semicolon.csv"),
    *("lists.json", "pandas.json", "BOM.jsonl.gz", "csv.gz", "json.gz"),
    *("tabs.csv", "two.csv", "after.csv", "ndjson", "lines.json"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_have_the_same_rows(tmp_path, folder, kind):
    expected = load(folder, write_jsonl(tmp_path / "a.jsonl", *LINES), **SETTINGS)
    path = tmp_path / f"rows.{kind}"
    write_kind(path, kind)
    assert content(load(folder, path, **SETTINGS)) == content(expected)


@pytest.mark.slow
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
    monkeypatch.setattr(parquet_files, "FREE_VALUES", 1)
    monkeypatch.setattr(parquet_files, "VALUES_PER_BYTE", 0)
    with pytest.raises(InputError, match="2 values in a column, expected at most 1 in"):
        list(read_records(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot be read as parquet"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty, expected at least one record"),
        ("a.csv", "prompt,prompt\n", "expected a unique name for each"),
        ("a.csv", ",,\n", "expected a unique name for each"),
        ("a.csv", "p,c,\n1,2, 3\n", "the last cell is ' 3', but its column has no"),
        ("a.csv", "p,c\n1,2\n1\n", "a.csv, line 3: 1 cells, expected 2, one for each"),
        ("a.csv", 'p,c\n1,"2\n', "line 2: a quote is opened and never closed; write a"),
        ("a.tsv", "p\tc\n\xe9", "a.tsv, line 2: 1 cells"),
        ("a.json", '{"prompt": "a"}', r"keys \['prompt'\], expected a list of objects"),
        ("a.json", '{"p": ["a"], "c": []}', "whose values are lists of one length"),
        ("a.jsonl.gz", "{}", "a.jsonl.gz cannot be decompressed as gzip"),
        ("a.csv", "\n", "has no line with column names"),
        ("a.csv", '""\n1\n', "expected a unique name for each"),
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


def test_compressed_files_have_limits(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": "b"}\n' * 100))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz cannot be decompressed"):
        list(read_records(path))
    path.write_bytes(whole)
    monkeypatch.setattr(compressed_files, "MAXIMUM_SIZE", 1099)
    with pytest.raises(InputError, match="more than 1,099 bytes after decompression"):
        list(read_records(path))
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = path.rename(tmp_path / "a.jsonl.zst")
    with pytest.raises(InputError, match="install the module with pip install zstanda"):
        list(read_records(path))


def test_zstandard_is_read_frame_by_frame(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    frames = [zstandard.compress(f'{{"a": {i}}}\n'.encode()) for i in range(2)]
    path.write_bytes(b"".join(frames))
    assert [record.content for record in read_records(path)] == [{"a": 0}, {"a": 1}]
    path.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(InputError, match="as Zstandard: it is truncated"):
        list(read_records(path))


def test_utf_16_is_recognized(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\n", encoding="utf-16")
    with pytest.raises(InputError, match="byte order mark of UTF-16, expected UTF-8"):
        list(read_records(path))
