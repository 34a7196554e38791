"""Prepares text files and reads the HDF5 files back."""

import hashlib
import importlib
import json
import math
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest
import yaml

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation import prepare
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    RecordFormat,
    Share,
    Splits,
    TextFormat,
    TokenizerChoice,
)
from prompt_tuning.data.preparation.tokenizer_files import open_tokenizer
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.example_tables import load_for
from tests.support.prepared_files import (
    columns,
    pairs,
    snapshot,
    texts,
    write_jsonl,
)
from tests.support.prepared_rows import LENGTH
from tests.support.shared_data import FIXTURES, SHARED, released
from tests.support.small_tokenizer import EOS

# Lines, their rows, the tokenizer, and the length of a row.
OURS = [
    (
        FIXTURES / f"data_prep/{name}.jsonl",
        FIXTURES / f"data_prep/{name}.hdf5",
        FIXTURES / "tokenizers/byte_level",
        LENGTH,
    )
    for name in ("tuning", "pretraining")
]
PUBLISHED = [
    (
        SHARED / f"data/data_prep/{name}/example_{name}_data.jsonl",
        SHARED / f"data/data_prep/{name}/data_prepped_{name}.hdf5",
        SHARED / "data/tokenizers/gpt2",
        1024,
    )
    for name in ("generative_tuning", "pretraining")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "rows", "tokenizer", "length"),
    [*OURS, *(released(*files) for files in PUBLISHED)],
)
def test_ids_and_types_equal_those_from_generative_data_prep(
    tmp_path, source, rows, tokenizer, length
):
    packing = "full" if "pretraining" in source.stem else "single::drop"
    output = prepare(
        Preparation(
            (str(source),),
            str(tmp_path / "out"),
            TokenizerChoice(str(tokenizer)),
            length=length,
            packing=packing,
        ),
        workers=1,
    )
    ours = columns(output / "train_1_of_1.hdf5")
    theirs = columns(rows)
    assert set(ours) == set(theirs)
    for key, expected in theirs.items():
        assert ours[key].dtype == expected.dtype
        np.testing.assert_array_equal(ours[key], expected)


@pytest.mark.slow
def test_a_pair_is_joined_by_a_space_and_ends_with_eos(tmp_path, make, tokenizer):
    source = write_jsonl(
        tmp_path / "a.jsonl", {"prompt": "hi:  ", "completion": "  yes"}
    )
    output = make(source, packing="single::drop")
    assert texts(output, tokenizer) == [[(0, "hi:"), (1, " yes"), (3, EOS)]]
    as_it_is = make(
        source,
        name="raw",
        packing="single::drop",
        text=TextFormat(space_separator=False),
    )
    assert texts(as_it_is, tokenizer) == [[(0, "hi:  "), (1, "  yes"), (3, EOS)]]


def write_parquet(path, records):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        importlib.import_module("pyarrow").Table.from_pylist(records), path
    )


def write_list(path, records):
    path.write_text(json.dumps(records, indent=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write", "unit"),
    [("a.json", write_list, "item 2"), ("a.parquet", write_parquet, "row 1")],
)
def test_lists_and_parquet_files_are_read_as_lines(tmp_path, make, name, write, unit):
    records = [
        {"prompt": "hi", "completion": "yes", "score": 0.5},
        {"prompt": "né\n", "completion": "", "score": math.nan},
        {"prompt": "a", "completion": "b", "score": 1.0},
    ]
    write(tmp_path / name, records)
    output = make(tmp_path / name)
    lines = write_jsonl(tmp_path / "a.jsonl", *records)
    expected = make(lines, name="lines")
    file = "train_1_of_1.hdf5"
    assert (output / file).read_bytes() == (expected / file).read_bytes()
    digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert digest in (output / "metadata.yaml").read_text()
    records[1]["prompt"] = None
    write(tmp_path / name, records)
    with pytest.raises(InputError, match=f"{name}, {unit}: 'prompt' is null"):
        make(tmp_path / name, name="refused")


def test_a_damaged_list_is_skipped_on_request(tmp_path, make, tokenizer):
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_list(folder / "a.json", [{"completion": "hi"}])
    (folder / "b.json").write_text('[{"completion": "yes"}')
    with pytest.raises(InputError, match=r"b\.json is not valid JSON"):
        make(folder)
    output = make(folder, skip_malformed=True, packing="single::drop")
    assert texts(output, tokenizer) == [[(1, " hi"), (3, EOS)]]
    assert "b.json is not valid JSON" in (output / "skipped.jsonl").read_text()


def test_prefix_and_postfix_surround_existing_prompts(tmp_path, make, tokenizer):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "x", "completion": "y"},
        {"prompt": "", "completion": "z"},
    )
    output = make(
        source,
        packing="single::drop",
        text=TextFormat(prompt_prefix="Q:", prompt_postfix="\\n"),
    )
    assert texts(output, tokenizer) == [
        [(0, "Q:x\\n"), (1, " y"), (3, EOS)],
        [(1, " z"), (3, EOS)],
    ]


TURNS = [
    {"prompt": ["a", "b"], "completion": ["c", "d"]},
    [{"prompt": "a", "completion": "c"}, {"prompt": "b", "completion": "d"}],
]


@pytest.mark.slow
@pytest.mark.parametrize("line", TURNS)
def test_turns_of_a_line_are_limited_by_line_or_by_pair(
    tmp_path, make, tokenizer, line
):
    source = write_jsonl(tmp_path / "a.jsonl", line)
    by_line = make(source, packing="single::drop")
    assert texts(by_line, tokenizer) == [
        [(0, "a"), (1, f" c{EOS}"), (0, "b"), (1, " d"), (3, EOS)]
    ]
    attended = make(
        source,
        name="attended",
        packing="single::drop",
        text=TextFormat(attention_boundary="pair"),
    )
    assert texts(attended, tokenizer) == [
        [(0, "a"), (1, " c"), (3, EOS), (0, "b"), (1, " d"), (3, EOS)]
    ]
    apart = make(
        source,
        name="apart",
        packing="single::drop",
        text=TextFormat(attention_boundary="pair", packing_boundary="pair"),
    )
    assert texts(apart, tokenizer) == [
        [(0, "a"), (1, " c"), (3, EOS)],
        [(0, "b"), (1, " d"), (3, EOS)],
    ]


def test_lines_of_text_are_unchanged_completions(tmp_path, make, tokenizer):
    source = tmp_path / "a.txt"
    source.write_text("the end\n\n  \nof it", encoding="utf-8")
    output = make(source, packing="single::drop")
    assert texts(output, tokenizer) == [
        [(1, "the endĊ"), (3, EOS)],
        [(1, "of it"), (3, EOS)],
    ]


def test_tables_fill_templates(tmp_path, make, tokenizer):
    source = tmp_path / "a.csv"
    source.write_text(
        'text,label\n"one, ""two""\nthree",pos\n{label},neg\n', encoding="utf-8"
    )
    record = RecordFormat(prompt_template="{text} ->", completion_key="label")
    output = make(source, packing="single::drop", record=record)
    assert texts(output, tokenizer) == [
        [(0, 'one, "two"Ċthree ->'), (1, " pos"), (3, EOS)],
        [(0, "{label} ->"), (1, " neg"), (3, EOS)],
    ]
    plain = tmp_path / "a.tsv"
    plain.write_text('prompt\tcompletion\n5" disk\tyes\n', encoding="utf-8")
    output = make(
        plain, name="tsv", packing="single::drop", record=RecordFormat(quotes=False)
    )
    assert texts(output, tokenizer) == [[(0, '5" disk'), (1, " yes"), (3, EOS)]]


def test_categories_and_weights_are_separate_columns(tmp_path, make):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "a", "completion": "b", "category_id": "math", "weight": 0.5},
        {"prompt": "c", "completion": "d", "category_id": "code", "weight": 2},
    )
    record = RecordFormat(weight_key="weight", categories=("code", "math"))
    output = make(source, length=10, record=record)
    content = columns(output / "train_1_of_1.hdf5")
    assert content["category_ids"].tolist() == [[1] * 4 + [0] * 4 + [-1] * 2]
    assert content["loss_weights"].dtype == np.float32
    assert content["loss_weights"].tolist() == [[0.5] * 4 + [2.0] * 4 + [0.0] * 2]
    ids = json.loads((output / "category_to_id.json").read_text())
    assert ids == {"code": 0, "math": 1}


def test_rows_without_a_completion_are_dropped_unless_requested(tmp_path, make):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "a", "completion": ""},
        {"prompt": "a" * 12, "completion": "b"},
        {"prompt": "c", "completion": "d"},
    )
    choices = {"length": 8, "packing": "single::truncate_right"}
    output = make(source, **choices)
    counted = json.loads((output / "metrics.json").read_text())["train"]
    assert counted["sequences"] == 1
    assert counted["without_completion"] == 1
    assert counted["sequences_without_completion"] == 1
    with_prompts = make(
        source, name="kept", text=TextFormat(keep_prompt_only=True), **choices
    )
    assert len(columns(with_prompts / "train_1_of_1.hdf5")["input_ids"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["full", "greedy::drop", "single::truncate_left"])
def test_every_token_is_accounted_for(tmp_path, make, packing):
    source = write_jsonl(
        tmp_path / "a.jsonl",
        *pairs(20),
        {"prompt": "long" * 20, "completion": "answer" * 4},
    )
    output = make(source, packing=packing)
    counted = json.loads((output / "metrics.json").read_text())["train"]
    total = sum(counted[f"{t}_tokens"] for t in ("prompt", "completion", "separator"))
    lost = sum(
        counted[f"{how}_tokens"]
        for how in ("dropped", "truncated", "without_completion")
        if how != "without_completion"
    )
    lost += counted["tokens_without_completion"]
    assert counted["tokens_in"] == total + lost
    assert counted["sequences"] * 32 == total + counted["padding_tokens"]


def test_the_output_is_read_by_the_package(tmp_path, make, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(9))
    output = make(source, packing="greedy::drop")
    rows = Hdf5Rows(sorted(output.glob("train_*.hdf5")))
    row = rows[0]
    assert len(row.input_ids) == 32
    assert row.token_types is not None and set(row.token_types) <= {0, 1, 2, 3}
    again = load_tokenizer(output / "tokenizer")
    assert again.eos_id == load_tokenizer(tokenizer).eos_id


def test_examples_equal_those_of_the_jsonl_file(tmp_path, make, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(9))
    output = make(source, packing="single::drop", length=128)
    standard: dict[str, Any] = {
        "architecture": "decoder_only",
        "tokenizer": load_tokenizer(tokenizer),
        "vocabulary_size": 262,
        "use_token_type_ids": True,
    }
    direct = load_for(source, joiner=" ", **standard)
    prepared = load_for(output / "train_1_of_1.hdf5", **standard)
    assert len(direct) == len(prepared) == 9
    for index in range(9):
        ours, theirs = prepared[index], direct[index]
        assert ours.inputs.tolist() == theirs.inputs.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()


@pytest.mark.slow
def test_splits_are_disjoint_and_files_balanced(tmp_path, make, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(100))
    splits = Splits(Share(ratio=0.1), Share(count=7), train_files=4, shuffle=True)
    output = make(source, splits=splits, packing="single::drop", length=64)
    sizes = [
        len(columns(output / f"train_{i}_of_4.hdf5")["input_ids"]) for i in (1, 2, 3, 4)
    ]
    assert sizes == [21, 21, 21, 20]
    seen = [
        str(row)
        for file in sorted(output.glob("*.hdf5"))
        for row in texts(output, tokenizer, file.name)
    ]
    assert len(set(seen)) == len(seen) == 100
    lines = (output / "test.jsonl").read_text().splitlines()
    assert len(lines) == 7 and all(json.loads(line) in pairs(100) for line in lines)
    metadata = yaml.safe_load((output / "metadata.yaml").read_text())
    assert metadata["number_of_training_files"] == 4
    assert metadata["max_batch_size_train"] == 20
    assert metadata["max_batch_size_dev"] == 10


def test_checksums_match_the_files(tmp_path, make):
    output = make(write_jsonl(tmp_path / "a.jsonl", *pairs(5)))
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum here")
    command = ["sha256sum", "--check", "--strict", "checksums.sha256"]
    checked = subprocess.run(command, cwd=output, capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stdout.count("OK") == sum(p.is_file() for p in output.rglob("*")) - 1


@pytest.mark.exhaustive
def test_bytes_depend_on_the_seed_and_not_on_the_workers(tmp_path, make):
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", *pairs(300))
    (folder / "a.txt").write_text("some text\n" * 40)
    splits = Splits(Share(count=5), shuffle=True, train_files=2)
    one = make(folder, name="one", splits=splits)
    again = make(folder, name="again", splits=splits, workers=2)
    assert snapshot(one) == snapshot(again)
    other = make(folder, name="other", splits=Splits(Share(count=5), shuffle=True))
    assert snapshot(one).keys() != snapshot(other).keys()
    seeded = Splits(Share(count=5), shuffle=True, train_files=2, seed=1)
    third = snapshot(make(folder, name="third", splits=seeded))
    assert third["train_1_of_2.hdf5"] != snapshot(one)["train_1_of_2.hdf5"]


def test_special_tokens_get_roles(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", *pairs(2))
    choice = TokenizerChoice(
        str(tokenizer), (("eos_token", "<|done|>"), ("pad_token", EOS))
    )
    output = prepare(
        Preparation((str(source),), str(tmp_path / "out"), choice, length=64), workers=1
    )
    content = columns(output / "train_1_of_1.hdf5")
    metadata = yaml.safe_load((output / "metadata.yaml").read_text())
    assert metadata["eos_id"] == 262 and metadata["vocab_size"] == 263
    assert set(content["input_ids"][content["token_type_ids"] == 3]) == {262}
    pad = load_tokenizer(tokenizer).eos_id
    assert set(content["input_ids"][content["token_type_ids"] == 2]) == {pad}
    saved = load_tokenizer(output / "tokenizer", eos_id=262)
    assert saved.token(262) == "<|done|>"


def test_a_special_token_that_utf_8_cannot_encode(tmp_path, tokenizer):
    choice = TokenizerChoice(str(tokenizer), (("pad_token", "\ud800"),))
    with pytest.raises(InputError, match=r"pad_token.*half a surrogate pair"):
        open_tokenizer(choice)
