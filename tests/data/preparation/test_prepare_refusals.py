"""Unusable inputs and outputs are named in an error, and nothing is written."""

import dataclasses
import json

import pytest
import yaml

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation import worker_pool
from prompt_tuning.data.preparation.output_files import append_skipped
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    RecordFormat,
    Share,
    Splits,
    TokenizerChoice,
)
from prompt_tuning.data.rows import record_spans
from tests.support.prepared_files import (
    columns,
    pairs,
    snapshot,
    write_jsonl,
)

BAD = [
    ('{"prompt": "a"', "line 3 is not valid JSON"),
    ('["a"]', "line 3: found a str, expected an object"),
    ("[]", "line 3: the list is empty"),
    ('{"prompt": "a"}', "line 3: found the keys ['prompt'], expected 'completion'"),
    ('{"completion": 3.5}', "line 3: 'completion' is a float, expected a string"),
    ('{"prompt": ["a", "b"], "completion": ["c"]}', "line 3: 2 prompts and 1"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "need --chat"),
    ('{"completion": "a\\ud800"}', "line 3"),
    (
        '{"completion": %s}' % ("1" * 5000),
        "line 3 is not valid JSON: Exceeds",
    ),
    (
        '[{"messages": [{"role": "user", "content": "a"}]}, {"messages": []}]',
        "line 3: found a list of 2 objects with messages, expected one conversation",
    ),
    ('[{"completion": "a"}, {"messages": []}]', "line 3: found a list of 2 objects"),
]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["1e39", "1" + "0" * 400, "-1", "NaN", "true"])
def test_weights_outside_float32_are_named_or_skipped(tmp_path, make, weight):
    line = '{"completion": "a", "weight": %s}'
    source = write_jsonl(tmp_path / "a.jsonl", line % "3.4e38", line % weight)
    record = RecordFormat(weight_key="weight")
    with pytest.raises(InputError, match=r"line 2: 'weight' is .* to 3\.403e\+38"):
        make(source, record=record)
    counted = counts(make(source, record=record, skip_malformed=True))
    assert (counted["records"], counted["malformed"]) == (1, 1)


def counts(output):
    return json.loads((output / "metrics.json").read_text())["train"]


def skipped(output):
    lines = (output / "skipped.jsonl").read_text().splitlines()
    return [json.loads(line)["problem"] for line in lines]


BAD_FILES = {
    "a.jsonl": (b"", "is empty"),
    "b.jsonl": (b"\n \n", "no line with text"),
    "c.jsonl": ('{"completion": "a"}\n'.encode("utf-16"), "byte order mark of UTF-16"),
    "d.csv": (b"prompt,completion\n", "no row below its header"),
    "e.csv": (b"completion,completion\na,b\n", "a unique name for each"),
    "f.csv": (b'"completion\na\n', "line 1: a quote is opened and never closed"),
    "g.csv": (b"completion,\xe9\na,b\n", "not UTF-8"),
}


@pytest.mark.slow
def test_files_without_usable_rows_are_named_or_skipped(tmp_path, make):
    folder = tmp_path / "inputs"
    folder.mkdir()
    good = write_jsonl(folder / "z.jsonl", *pairs(3), "{")
    alone = make(good, name="alone", skip_malformed=True)
    for name, (content, message) in BAD_FILES.items():
        (folder / name).write_bytes(content)
        with pytest.raises(InputError, match=message) as problem:
            make(folder / name)
        assert name in str(problem.value)
        with pytest.raises(InputError, match=f"no input has a record: .*{message}"):
            make(folder / name, skip_malformed=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("alone", "inputs", "tokenizer")
    ]
    output = make(folder, skip_malformed=True)
    problems = skipped(output)
    assert len(problems) == len(BAD_FILES) + 1
    for listed, (name, (_, message)) in zip(problems, BAD_FILES.items(), strict=False):
        assert name in listed and message in listed
    assert counts(output) == counts(alone) | {"malformed_files": len(BAD_FILES)}
    for name in ("input_ids", "token_type_ids"):
        file = "train_1_of_1.hdf5"
        assert (columns(output / file)[name] == columns(alone / file)[name]).all()
    metadata = yaml.safe_load((output / "metadata.yaml").read_text())
    assert [entry["file"] for entry in metadata["inputs"]] == [*BAD_FILES, "z.jsonl"]


@pytest.mark.slow
def test_rows_and_lines_that_cannot_be_read_are_named_or_skipped(
    tmp_path, make, monkeypatch
):
    monkeypatch.setattr(record_spans, "MAXIMUM_RECORD", 60)
    for name, bad, message in [
        ("a.csv", 'a,"b', "a quote is opened and never closed"),
        (
            "b.csv",
            "a," + "b" * 60,
            "found a record of 63 bytes, expected one",
        ),
        ("c.txt", "c" * 61, "found a record of 62 bytes"),
    ]:
        lines = ["prompt,completion", "one,1", bad, "two,2", "three,3"]
        source = tmp_path / name
        source.write_text("\n".join(lines))
        with pytest.raises(InputError, match=f"{name}, line 3: {message}"):
            make(source)
        output = make(source, name=f"out_{name}", skip_malformed=True)
        used = len(lines) - 1 if name.endswith("txt") else len(lines) - 2
        assert (counts(output)["records"], counts(output)["malformed"]) == (used, 1)
        (problem,) = skipped(output)
        assert f"{name}, line 3: {message}" in problem


def test_problems_are_listed_in_order_for_any_split_of_the_work(
    tmp_path, make, monkeypatch
):
    bad = ['{"completion": "a\\ud800"}', "{", '{"completion": "b\\ud800"}', "["]
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(1), *bad)
    together = make(source, name="together", skip_malformed=True)
    monkeypatch.setattr(worker_pool, "TASK_RECORDS", 2)
    assert snapshot(make(source, skip_malformed=True)) == snapshot(together)
    assert [problem.split("line ")[1][0] for problem in skipped(together)] == list(
        "2345"
    )


def test_a_problem_is_listed_whatever_it_quotes(tmp_path):
    append_skipped(tmp_path, ["half \ud800 é"])
    line = (tmp_path / "skipped.jsonl").read_text()
    assert json.loads(line) == {"problem": "half \ud800 é"}


def test_a_file_is_read_once(tmp_path, tokenizer):
    folder = tmp_path / "inputs"
    folder.mkdir()
    source = write_jsonl(folder / "a.jsonl", *pairs(3))
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for names in [(source, source), (folder, source), (source, link), (folder, folder)]:
        preparation = Preparation(
            tuple(map(str, names)),
            str(tmp_path / "out"),
            TokenizerChoice(str(tokenizer)),
        )
        with pytest.raises(InputError, match=r"is the file .*a\.jsonl, which is named"):
            prepare(preparation, workers=1)
    assert prepare(
        dataclasses.replace(preparation, inputs=(str(link),)), workers=1
    ).is_dir()


def test_other_encodings_are_named(tmp_path, make):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"completion": "a"}\n{"completion": "caf\xe9"}\n')
    with pytest.raises(InputError, match="line 2 is not UTF-8 text: byte 20 is 0xe9"):
        make(source)
    source.write_bytes('{"completion": "a"}\n'.encode("utf-16"))
    with pytest.raises(InputError, match="byte order mark of UTF-16"):
        make(source)
    source.write_bytes(b'\xef\xbb\xbf{"completion": "a"}\n')
    assert make(source).is_dir()


def test_unknown_categories_are_named(tmp_path, make):
    source = write_jsonl(
        tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", "category_id": "art"}
    )
    with pytest.raises(
        InputError, match="line 1: the category is 'art', expected one of 'math'"
    ):
        make(source, record=RecordFormat(categories=("math",)))


@pytest.mark.parametrize(
    ("key", "values", "choice"),
    [
        ("category_id", "xy", {"categories": ("x", "y")}),
        ("w", (1, 2), {"weight_key": "w"}),
    ],
)
def test_turns_of_one_line_have_one_category_and_weight(
    tmp_path, make, key, values, choice
):
    turns = [{"prompt": "", "completion": "a", key: value} for value in values]
    source = write_jsonl(tmp_path / "a.jsonl", turns)
    with pytest.raises(InputError, match=r"line 1: .* in the first object"):
        make(source, record=RecordFormat(**choice))


def test_inputs_without_rows_are_refused(tmp_path, make):
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
    with pytest.raises(InputError, match=r"2 sequences.*reduce --train_files"):
        make(empty, packing="single::drop", splits=Splits(train_files=3))
    with pytest.raises(InputError, match="there is no such file"):
        make(tmp_path / "missing.jsonl")
    other = tmp_path / "a.xml"
    other.write_text("x")
    (tmp_path / "a.json").write_text('{"prompt": "a"}')
    with pytest.raises(InputError, match="contains an object with the keys"):
        make(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(InputError, match="json has no record"):
        make(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"ends with '.xml'"):
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
    with pytest.raises(InputError, match="a unique name for each"):
        make(table, record=record)


@pytest.mark.slow
def test_an_existing_output_is_not_changed(tmp_path, make, tokenizer):
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
    with pytest.raises(InputError, match=r"contains notes\.txt, which would be lost"):
        prepare(longer, workers=1, force=True)
    with pytest.raises(InputError, match="is inside the input folder"):
        make(tmp_path)


@pytest.mark.parametrize("folder", ["out", ".out.preparing"])
def test_the_output_does_not_replace_an_input(tmp_path, tokenizer, folder):
    (tmp_path / folder).mkdir()
    inside = write_jsonl(tmp_path / folder / "test.jsonl", *pairs(5))
    apart = write_jsonl(tmp_path / "a.jsonl", *pairs(5))
    link = tmp_path / "link.jsonl"
    link.symlink_to(inside)
    tokenizer_folder = tokenizer.rename(tmp_path / folder / "tokenizer")
    other = tmp_path / "tokenizer"
    other.symlink_to(tokenizer_folder)
    before = snapshot(tmp_path)
    for source, chosen, what in [
        (inside, other, "input"),
        (link, other, "input"),
        (apart, tokenizer_folder, "tokenizer"),
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
