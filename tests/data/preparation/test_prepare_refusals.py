"""Inputs and outputs that cannot be used are named, and nothing is written."""

import json

import pytest

from prompt_tuning.data.preparation.prepare import prepare
from prompt_tuning.data.preparation.settings import (
    Preparation,
    RecordFormat,
    Share,
    Splits,
    TokenizerChoice,
)
from prompt_tuning.errors import InputError
from tests.data.preparation.prepared_files import (
    columns,
    pairs,
    snapshot,
    write_jsonl,
)

BAD = [
    ('{"prompt": "a"', "line 3: not JSON"),
    ('["a"]', "line 3: found a str, expected an object"),
    ("[]", "line 3: the list is empty"),
    ('{"prompt": "a"}', "line 3: found the keys ['prompt'], expected 'completion'"),
    ('{"completion": 3}', "line 3: 'completion' is a int, expected a string"),
    ('{"prompt": ["a", "b"], "completion": ["c"]}', "line 3: 2 prompts and 1"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "need --chat"),
    ('{"completion": "a\\ud800"}', "line 3"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_malformed_line_is_named_or_skipped_and_counted(
    tmp_path, make, line, message
):
    good = pairs(3)
    source = write_jsonl(tmp_path / "a.jsonl", good[0], "", line, *good[1:])
    with pytest.raises(InputError) as problem:
        make(source)
    assert message in str(problem.value)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    output = make(source, skip_malformed=True)
    counted = json.loads((output / "metrics.json").read_text())["train"]
    assert counted["malformed"] == 1 and counted["records"] == 3
    skipped = (output / "skipped.jsonl").read_text().splitlines()
    assert len(skipped) == 1 and message in json.loads(skipped[0])["problem"]


def test_other_encodings_are_named(tmp_path, make):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"completion": "a"}\n{"completion": "caf\xe9"}\n')
    with pytest.raises(InputError, match=r"line 2: byte 20 .* is 0xe9.*not UTF-8"):
        make(source)
    source.write_bytes('{"completion": "a"}\n'.encode("utf-16"))
    with pytest.raises(InputError, match="begins as UTF-16 does"):
        make(source)
    source.write_bytes(b'\xef\xbb\xbf{"completion": "a"}\n')
    assert make(source).is_dir()


def test_unknown_categories_are_named(tmp_path, make):
    source = write_jsonl(
        tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "category": "art"}
    )
    with pytest.raises(
        InputError, match="line 1: the category is 'art', expected one of 'math'"
    ):
        make(source, record=RecordFormat(categories=("math",)))


def test_inputs_that_hold_nothing_are_refused(tmp_path, make):
    empty = tmp_path / "a.jsonl"
    empty.touch()
    with pytest.raises(InputError, match="is empty"):
        make(empty)
    empty.write_text("\n \n")
    with pytest.raises(InputError, match="no line with text"):
        make(empty)
    write_jsonl(empty, {"prompt": "a", "completion": ""})
    with pytest.raises(InputError, match="nothing is left in the train split"):
        make(empty)
    write_jsonl(empty, *pairs(2))
    with pytest.raises(InputError, match=r"2 sequences.*fewer --train_files"):
        make(empty, packing="single::drop", splits=Splits(train_files=3))
    with pytest.raises(InputError, match="there is no such file"):
        make(tmp_path / "missing.jsonl")
    other = tmp_path / "a.parquet"
    other.write_text("x")
    with pytest.raises(InputError, match=r"ends with '.parquet'"):
        make(other)


def test_tables_that_do_not_fit_are_refused(tmp_path, make):
    table = tmp_path / "a.csv"
    table.write_text("text,label\na,b\n")
    with pytest.raises(InputError, match=r"columns \['text', 'label'\], expected 'com"):
        make(table)
    record = RecordFormat(prompt_key="text", completion_key="label")
    table.write_text("text,label\na,b\nc\n")
    with pytest.raises(InputError, match="line 3: 1 cells, expected 2"):
        make(table, record=record)
    table.write_text('text,label\na,"b\nc,d\n')
    with pytest.raises(InputError, match="line 2: a quote is opened and never closed"):
        make(table, record=record)
    table.write_text("text,text\na,b\n")
    with pytest.raises(InputError, match="a name of its own for each"):
        make(table, record=record)


def test_an_output_that_is_there_is_not_touched(tmp_path, make, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(5))
    output = make(source)
    before = snapshot(output)
    with pytest.raises(InputError, match="--force replaces them"):
        make(source)
    assert snapshot(output) == before
    assert not [path for path in tmp_path.iterdir() if "preparing" in path.name]
    longer = Preparation(
        (str(source),), str(output), TokenizerChoice(str(tokenizer)), length=64
    )
    prepare(longer, workers=1, force=True)
    assert columns(output / "train_1_of_1.hdf5")["input_ids"].shape[1] == 64
    (output / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt, which would be lost"):
        prepare(longer, workers=1, force=True)
    with pytest.raises(InputError, match="lies in the input folder"):
        make(tmp_path)


@pytest.mark.parametrize("folder", ["out", ".out.preparing"])
def test_what_is_read_is_not_replaced_by_the_output(tmp_path, tokenizer, folder):
    (tmp_path / folder).mkdir()
    inside = write_jsonl(tmp_path / folder / "test.jsonl", *pairs(5))
    apart = write_jsonl(tmp_path / "a.jsonl", *pairs(5))
    link = tmp_path / "link.jsonl"
    link.symlink_to(inside)
    own = tokenizer.rename(tmp_path / folder / "tokenizer")
    other = tmp_path / "tokenizer"
    other.symlink_to(own)
    before = snapshot(tmp_path)
    for source, chosen, what in [
        (inside, other, "input"),
        (link, other, "input"),
        (apart, own, "tokenizer"),
        (apart, other, "tokenizer"),
    ]:
        preparation = Preparation(
            (str(source),), str(tmp_path / "out"), TokenizerChoice(str(chosen))
        )
        with pytest.raises(InputError, match=f"{what} .* would be lost"):
            prepare(preparation, workers=1, force=True)
        assert snapshot(tmp_path) == before


def test_the_texts_of_the_test_split_are_of_used_records(tmp_path, make):
    good, bad = pairs(4), '{"completion": "a\\ud800"}'
    source = write_jsonl(tmp_path / "a.jsonl", good[0], bad, *good[1:], bad)
    splits = Splits(test=Share(count=6))
    source.write_text(source.read_text() + json.dumps(good[0]) + "\n")
    output = make(source, skip_malformed=True, splits=splits)
    counted = json.loads((output / "metrics.json").read_text())["test"]
    lines = (output / "test.jsonl").read_text().splitlines()
    assert len(lines) == counted["records"] == 6 - counted["malformed"]
    assert counted["malformed"] > 0
    assert all(json.loads(line) in good for line in lines)
