"""Finds the rows of tables; the `csv` module is the reference."""

import csv
import gzip
import io
import random
import time

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.input_files import find_input_files
from prompt_tuning.data.preparation.preparation_settings import RecordFormat
from prompt_tuning.data.preparation.record_index import RecordIndex, write_index
from prompt_tuning.data.rows import record_spans
from prompt_tuning.data.rows.csv_rows import Table
from tests.support.exhaustive import sample
from tests.support.prepared_files import texts
from tests.support.small_tokenizer import EOS


def cells(content: bytes, location: str, delimiter: str = ",") -> list[str]:
    return Table((), delimiter, True, "").cells(content, location)


def rows(tmp_path, content: bytes, suffix: str = ".csv") -> list[list[str]]:
    """Returns the rows below the header `a,b`."""
    table = tmp_path / f"table{suffix}"
    delimiter = {".csv": b",", ".tsv": b"\t"}[suffix]
    table.write_bytes(delimiter.join([b"a", b"b"]) + b"\n" + content)
    (file,) = find_input_files([str(table)], RecordFormat())
    write_index([file], tmp_path / "index", lambda read: None)
    index = RecordIndex(tmp_path / "index")
    whole = table.read_bytes()
    return [
        cells(whole[start : start + size], f"line {line}", delimiter.decode())
        for _, start, size, line in index.read(np.arange(len(index))).tolist()
    ]


def test_compressed_files_are_prepared_like_plain_ones(tmp_path, make, tokenizer):
    contents = {
        "a.jsonl": '{"prompt": "a", "completion": 1}\n\n{"prompt": "b"}\n',
        "b.csv": ',prompt,completion\n0,"x, y",z\n',
        "c.txt": "text\n",
        "d.json": '{"prompt": ["e"], "completion": ["f"]}',
    }
    outputs = []
    for suffix in ("", ".gz"):
        folder = tmp_path / f"inputs{suffix}"
        folder.mkdir()
        for name, text in contents.items():
            content = text.encode()
            content = gzip.compress(content) if suffix else content
            (folder / f"{name}{suffix}").write_bytes(content)
        output = make(folder, name=f"out{suffix}", skip_malformed=True)
        outputs.append(texts(output, tokenizer))
        (problem,) = (output / "skipped.jsonl").read_text().splitlines()
        assert f"a.jsonl{suffix}, line 3: found the keys" in problem
    assert outputs[0] == outputs[1]
    assert sum(kind == 3 for row in outputs[0] for kind, _ in row) == 4


def test_a_quote_within_a_cell_is_a_character(tmp_path, make, tokenizer):
    source = tmp_path / "a.tsv"
    source.write_text(
        "prompt\tcompletion\n"
        'a 5" disk\tA\nfoo\tB\nbar\tC\nanother 3" disk\tD\nlast\tE\n'
    )
    actual = texts(make(source, packing="single::drop"), tokenizer)
    assert actual == [
        [(0, prompt), (1, f" {completion}"), (3, EOS)]
        for prompt, completion in [
            ('a 5" disk', "A"),
            ("foo", "B"),
            ("bar", "C"),
            ('another 3" disk', "D"),
            ("last", "E"),
        ]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "delimiter"), sample(1, [(".csv", ","), (".tsv", "\t")])
)
def test_rows_equal_the_csv_modules(tmp_path, suffix, delimiter):
    draw = random.Random(0)
    read = several = 0
    for _ in range(1000):
        pieces = draw.choices(['"', '"', "x", delimiter, "\n", "é"], k=12)
        text = "".join(pieces) + "\n"
        reader = csv.reader(
            io.StringIO(text, newline=""), delimiter=delimiter, strict=True
        )
        try:
            expected = [row for row in reader if row]
        except csv.Error:
            with pytest.raises(InputError):
                rows(tmp_path, text.encode(), suffix)
            continue
        if not expected or any(not "".join(row).strip() for row in expected):
            continue  # Blank lines are not records.
        assert rows(tmp_path, text.encode(), suffix) == expected
        read += 1
        several += "\n" in "".join("".join(row) for row in expected)
    assert read > 100 and several > 10


def test_a_record_of_two_rows_is_refused():
    with pytest.raises(InputError, match="line 2: found more than one row"):
        cells(b"a,b\rc,d\n", "line 2")
    assert cells(b'a,"b\rc"\r\n', "line 2") == ["a", "b\rc"]


@pytest.mark.slow
def test_a_long_quoted_cell_costs_no_more_than_its_bytes(tmp_path):
    lines = (b"x" * 199 + b"\n") * 50_000
    begun = time.monotonic()
    assert rows(tmp_path, b'"' + lines + b'",y\n') == [[lines.decode(), "y"]]
    # Reading the whole cell again for each of its lines would read 2.5e11 bytes.
    assert time.monotonic() - begun < 30


def records(tmp_path, content: bytes) -> list[bytes]:
    """Returns the records of a table without a header; checks that all is read once."""
    table = tmp_path / "table.csv"
    table.write_bytes(content)
    told: list[bytes] = []
    lying = list(record_spans.find_spans(table, b",", told.append))
    assert b"".join(told) == content
    assert [content[: span.start].count(b"\n") + 1 for span in lying] == [
        span.line for span in lying
    ]
    return [content[span.start : span.start + span.size] for span in lying]


def test_an_unclosed_quote_invalidates_only_its_line(tmp_path):
    rows = [b'a,"b\n', b"c,d\n", b'e,""\n', b"f,g"]
    assert records(tmp_path, b"".join(rows)) == rows
    # A quote closed by another affects both lines: text after `"` is invalid.
    rows = [b'a,"b\n"y",d\n', b"e,f\n"]
    assert records(tmp_path, b"".join(rows)) == rows


def test_overlong_records_are_not_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(record_spans, "MAXIMUM_RECORD", 16)
    monkeypatch.setattr(record_spans, "_READ_SIZE", 5)
    short, long = [b'a,"b\nc"\n', b"d,e\n"], b"x" * 40 + b"\n"
    assert records(tmp_path, short[0] + long + short[1]) == [short[0], long, short[1]]
    assert records(tmp_path, short[1] + b"x" * 40) == [short[1], b"x" * 40]
    # A quote that stays open for more than 16 bytes.
    rows = [b'a,"bcdefg\n', b"hijk,lmnopq\n", b'r,"s"\n']
    assert records(tmp_path, b"".join(rows)) == rows


def test_tasks_of_the_format_alpaca_are_pairs(tmp_path, tokenizer, make):
    table = tmp_path / "alpaca.csv"
    table.write_text("instruction,input,output\nAdd.,1 2,3\nName a color.,,red\n")
    output = make(table, packing="single::drop")
    prompts = ["Add.Ċ1 2", "Name a color."]
    assert texts(output, tokenizer) == [
        [(0, prompts[0]), (1, " 3"), (3, EOS)],
        [(0, prompts[1]), (1, " red"), (3, EOS)],
    ]
