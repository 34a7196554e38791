import json
import re

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.rows.jsonl import LineEncoder, read_lines
from prompt_tuning.data.rows.jsonl_rows import JsonlRows
from prompt_tuning.data.text.tokenizers import load_tokenizer, separate_pair
from tests.support import prepared_rows as prepared
from tests.support.prepared_rows import PRETRAINING, TUNING
from tests.support.shared_data import FIXTURES

BYTE_LEVEL = FIXTURES / "tokenizers/byte_level"
BPE = FIXTURES / "tokenizers/bpe"
UNIGRAM = FIXTURES / "tokenizers/unigram"


class Letters:
    """A tokenizer whose IDs number the letters of the alphabet from 3."""

    vocabulary_size = 29
    bos_id: int | None = 1
    eos_id: int | None = 2
    pad_id = 0
    begin_ids: tuple[int, ...] = (1,)

    def encode(self, text):
        return [ord(letter) - ord("a") + 3 for letter in text]

    def encode_continuation(self, text):
        return self.encode(text)

    def decode(self, ids):
        return "".join(self.token(i) for i in ids if i > 2)

    def token(self, id):
        return chr(id - 3 + ord("a"))


def open_lines(path, tokenizer, *, add_eos=True, **keys):
    return JsonlRows(path, LineEncoder(tokenizer, **keys), add_eos=add_eos)


def typed_row(rows, index):
    ids, types, _ = rows[index]
    assert types is not None
    return ids, types


def write_hdf5(path, **data_sets):
    with h5py.File(path, "w") as file:
        for name, values in data_sets.items():
            file.create_dataset(name, data=values)
    return path


def write_lines(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_prepared_files_are_read_as_they_were_written():
    rows = Hdf5Rows([TUNING, PRETRAINING])
    assert len(rows) == prepared.ROWS + prepared.TEXT_ROWS
    ids, types = typed_row(rows, 1)
    title = load_tokenizer(BYTE_LEVEL).encode("Title of:")
    assert ids[: len(title)].tolist() == title
    assert ids.shape == types.shape == (prepared.LENGTH,)
    assert ids.dtype == types.dtype == np.int32
    assert set(ids[types >= 2].tolist()) == {prepared.END}
    # The pretraining file has no prompt; its rows follow the first file's.
    assert typed_row(rows, prepared.ROWS)[1][0] == 1
    assert rows.describe(prepared.ROWS) == f"{PRETRAINING}, row 0"
    counts = np.zeros(4, int)
    for block in rows.blocks():
        assert block.token_types is not None
        counts += np.bincount(block.token_types.ravel(), minlength=4)
    completions = prepared.COMPLETIONS + prepared.TEXTS
    separators = prepared.ROWS + prepared.ARTICLES
    assert counts[[0, 1, 3]].tolist() == [prepared.PROMPTS, completions, separators]


def test_lines_become_the_rows_of_generative_data_prep(tmp_path):
    """Its rule: one space between the texts, first token of the completion."""
    source = FIXTURES / "data_prep/tuning.jsonl"
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    stripped = [
        {"prompt": e["prompt"].rstrip(" "), "completion": e["completion"].lstrip(" ")}
        for e in lines
    ]
    file = write_lines(tmp_path / "pairs.jsonl", *map(json.dumps, stripped))
    tokenizer = load_tokenizer(BYTE_LEVEL)
    rows = open_lines(file, tokenizer, joiner=" ")
    every = [typed_row(rows, index) for index in range(len(rows))]
    fitting = [row for row in every if len(row[0]) <= prepared.LENGTH]
    assert len(fitting) == prepared.ROWS
    written = Hdf5Rows(TUNING)
    for index, (ids, types) in enumerate(fitting):
        expected, expected_types = typed_row(written, index)
        np.testing.assert_array_equal(ids, expected[: len(ids)])
        np.testing.assert_array_equal(types, expected_types[: len(ids)])


def test_a_line_for_the_story_model_decodes_to_its_text(tmp_path):
    line = json.dumps({"prompt": "hello=", "completion": "olleh"})
    file = write_lines(tmp_path / "pairs.jsonl", line)
    tokenizer = load_tokenizer(BPE)
    ids, types = typed_row(open_lines(file, tokenizer), 0)
    assert (ids[0], types[0]) == (1, 0)
    assert (ids[-1], types[-1]) == (2, 3)
    assert tokenizer.decode(ids) == "hello=olleh"
    assert tokenizer.decode(ids[types == 0]) == "hello="


def test_a_pair_becomes_ids_and_types(tmp_path):
    line = json.dumps({"prompt": "ab", "completion": "ba"})
    file = write_lines(tmp_path / "pairs.jsonl", line, "", line)
    rows = open_lines(file, Letters())
    assert len(rows) == 2
    ids, types = typed_row(rows, 0)
    assert ids.tolist() == [1, 3, 4, 4, 3, 2]
    assert types.tolist() == [0, 0, 0, 1, 1, 3]
    assert rows.describe(1) == f"{file}, line 3"
    open_ended = open_lines(file, Letters(), add_eos=False, joiner="z")
    ids, types = typed_row(open_ended, 0)
    assert ids.tolist() == [1, 3, 4, 28, 4, 3]
    assert types.tolist() == [0, 0, 0, 1, 1, 1]


def test_texts_without_a_prompt(tmp_path):
    file = write_lines(tmp_path / "texts.jsonl", '{"question": "abc", "answer": 7}')
    rows = open_lines(
        file, Letters(), prompt_key=None, completion_key="question", joiner="z"
    )
    ids, types = typed_row(rows, 0)
    assert ids.tolist() == [1, 3, 4, 5, 2]
    assert types.tolist() == [0, 1, 1, 1, 3]


def test_the_answer_to_an_encoder_is_a_separate_text(tmp_path):
    line = json.dumps({"prompt": "good movie", "completion": "positive"})
    file = write_lines(tmp_path / "pairs.jsonl", line)
    tokenizer = load_tokenizer(UNIGRAM)
    ids, types = typed_row(open_lines(file, tokenizer, encode_pair=separate_pair), 0)
    assert [tokenizer.token(int(i)) for i in ids[types == 1]] == ["\u2581positive"]


def test_blocks_fill_shorter_rows_with_padding(tmp_path):
    lines = [json.dumps({"prompt": "", "completion": text}) for text in ("abc", "a")]
    (block,) = open_lines(write_lines(tmp_path / "a.jsonl", *lines), Letters()).blocks()
    assert block.token_types is not None
    assert block.token_types.tolist() == [[0, 1, 1, 1, 3], [0, 1, 3, 2, 2]]


def test_blocks_join_files_of_different_length(tmp_path):
    first = write_hdf5(tmp_path / "a.hdf5", input_ids=np.full((2, 3), 7))
    second = write_hdf5(tmp_path / "b.hdf5", input_ids=np.full((1, 5), 8, np.uint16))
    rows = Hdf5Rows([first, str(second)])
    assert [(block.start, block.input_ids.shape) for block in rows.blocks()] == [
        (0, (2, 3)),
        (2, (1, 5)),
    ]
    assert rows[2].input_ids.tolist() == [8] * 5
    assert rows[2].token_types is None
    with pytest.raises(IndexError):
        rows[3]


ROWS = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("data_sets", "message"),
    [
        ({}, r"has the data sets \[\], expected 'input_ids'"),
        ({"tokens": ROWS}, r"\['tokens'\], expected 'input_ids'"),
        ({"input_ids": ROWS[0]}, r"input_ids has shape \(3,\), expected \[rows, l"),
        ({"input_ids": ROWS[:0]}, r"input_ids has shape \(0, 3\)"),
        ({"input_ids": h5py.Empty("i4")}, "input_ids has shape None"),
        ({"input_ids": ROWS.astype(float)}, "has type float64, expected an integer"),
        (
            {"input_ids": ROWS, "token_type_ids": ROWS[:, :2]},
            r"token_type_ids has shape \(2, 2\), expected \(2, 3\), the shape of",
        ),
    ],
)
def test_hdf5_files_with_other_content_are_refused(tmp_path, data_sets, message):
    path = write_hdf5(tmp_path / "bad.hdf5", **data_sets)
    with pytest.raises(InputError, match=re.escape(str(path)) + ".*" + message):
        Hdf5Rows(path)


def test_files_that_cannot_be_opened_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"absent\.hdf5 not found"):
        Hdf5Rows(tmp_path / "absent.hdf5")
    with pytest.raises(InputError, match="contains no data file"):
        Hdf5Rows(tmp_path)
    with pytest.raises(InputError, match="the list is empty"):
        Hdf5Rows([])
    text = write_lines(tmp_path / "text.hdf5", "not HDF5")
    with pytest.raises(InputError, match=r"text\.hdf5 cannot be opened as HDF5"):
        Hdf5Rows(text)
    whole = write_hdf5(tmp_path / "whole.hdf5", input_ids=np.zeros((100, 100), int))
    cut = tmp_path / "cut.hdf5"
    cut.write_bytes(whole.read_bytes()[:40_000])
    with pytest.raises(InputError, match=r"cut\.hdf5 cannot be opened.*truncated"):
        Hdf5Rows(cut)


def test_damaged_rows_are_refused_when_they_are_read(tmp_path):
    path = tmp_path / "damaged.hdf5"
    with h5py.File(path, "w") as file:
        values = np.arange(1000, dtype=np.int32).reshape(10, 100)
        stored = file.create_dataset("input_ids", data=values, compression="gzip")
        offset = stored.id.get_chunk_info(0).byte_offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 50] = bytes(50)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged\.hdf5, rows 0 to 9, cannot be read"):
        list(Hdf5Rows(path).blocks())


def test_files_with_and_without_types_do_not_mix(tmp_path):
    typed = write_hdf5(tmp_path / "a.hdf5", input_ids=ROWS, token_type_ids=ROWS)
    plain = write_hdf5(tmp_path / "b.hdf5", input_ids=ROWS)
    with pytest.raises(InputError, match=r"a\.hdf5 and .*b\.hdf5 only one has"):
        Hdf5Rows([typed, plain])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", ', "line 2 is not valid JSON"),
        ('["a", "b"]', "line 2: found a list, expected an object"),
        ('{"prompt": "a"}', r"line 2: found the keys \['prompt'\], expected 'complet"),
        (
            '{"prompt": 3.5, "completion": "a"}',
            "line 2: 'prompt' is a float, expected",
        ),
    ],
)
def test_lines_that_are_not_pairs_are_refused(tmp_path, line, message):
    good = '{"prompt": "a", "completion": "b"}'
    path = write_lines(tmp_path / "pairs.jsonl", good, line, good)
    with pytest.raises(InputError, match=r"pairs\.jsonl, " + message):
        open_lines(path, Letters())


def test_whole_numbers_are_labels(tmp_path):
    """As in a table, whose cells are texts."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": -7, "completion": 10}')
    encoder = LineEncoder(Letters())
    assert encoder.texts(next(read_lines(path))) == ("-7", "10")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"completion": "é"}'.encode("latin-1"))
    with pytest.raises(InputError, match="line 1 is not UTF-8 text: byte 17 is 0xe9"):
        open_lines(path, Letters())


def test_empty_files_are_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"empty\.jsonl is empty, expected at least one"
    ):
        open_lines(write_lines(tmp_path / "empty.jsonl"), Letters())


def test_a_row_without_an_eos_token_cannot_be_ended(tmp_path):
    endless = Letters()
    endless.eos_id = None
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "a", "completion": "b"}')
    with pytest.raises(InputError, match="defines no EOS"):
        open_lines(path, endless)
    assert open_lines(path, endless, add_eos=False)[0].input_ids.tolist() == [1, 3, 4]


def test_lines_are_bounded(tmp_path):
    path = write_lines(tmp_path / "long.jsonl", '{"a": "' + "x" * 5_000_000 + '"}')
    with pytest.raises(InputError, match=r"line 1: 4,194,305 bytes or more, expected"):
        list(read_lines(path))
    path = write_lines(tmp_path / "deep.jsonl", '{"a": ' + "[" * 100_000)
    with pytest.raises(InputError, match=r"line 1 nests its JSON more than 100 levels"):
        list(read_lines(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "prompt,completion\na,\nb,c\n,\nd,e\n"),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": ""}\n{"prompt": "b", "completion": "c"}\n'
            '{"prompt": "", "completion": ""}\n{"prompt": "d", "completion": "e"}\n',
        ),
    ],
)
def test_records_with_an_empty_completion_are_left_out_and_counted(
    tmp_path, name, content
):
    """As `prepare` does: nothing but EOS would be learned."""
    path = tmp_path / name
    path.write_text(content)
    rows = open_lines(path, Letters())
    assert [typed_row(rows, i)[0].tolist() for i in range(2)] == [
        [1, 4, 5, 2],
        [1, 6, 7, 2],
    ]
    assert (len(rows), rows.without_completion, rows.records) == (2, 2, [1, 3])
    assert rows.describe(1).endswith(("line 5", "line 4"))
    lines = content.splitlines(keepends=True)
    path.write_text("".join(lines[: 2 if name == "a.csv" else 1]))
    with pytest.raises(
        InputError, match="no record has a completion, or it is empty in all 1"
    ):
        open_lines(path, Letters())
