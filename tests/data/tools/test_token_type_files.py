"""Adding types to HDF5 files: correctly and completely, or not at all."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows import row_sources
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.tools import token_type_files
from prompt_tuning.data.tools.token_type_files import add_token_types
from prompt_tuning.data.tools.type_rules import AllCompletion, GivenTypes, PromptLengths
from tests.support.prepared_rows import END, TUNING
from tests.support.small_runs import files, write_rows

__all__ = ["files"]

ROWS = np.array([[7, 5, 8, 2, 0], [7, 7, 5, 8, 2], [5, 9, 9, 2, 0]], np.int32)
EXPECTED = [[0, 0, 1, 3, 2], [0, 0, 0, 1, 3], [0, 1, 1, 3, 2]]
BY_SEPARATOR = ["--until_last", "5", "--end", "2", "--padding", "0"]


def write(path: Path, ids: np.ndarray = ROWS, **others: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        file.attrs["made_by"] = np.bytes_("hand")
        file.create_dataset(
            "input_ids", data=ids, compression="gzip", maxshape=(None, ids.shape[1])
        )
        for name, values in others.items():
            file.create_dataset(name, data=values).attrs["unit"] = name
    return path


def data_set(file: h5py.File, name: str) -> h5py.Dataset:
    dataset = file[name]
    assert isinstance(dataset, h5py.Dataset)
    return dataset


def read(path: Path) -> dict[str, list]:
    with h5py.File(path) as file:
        return {str(name): data_set(file, str(name))[:].tolist() for name in file}


def names_in_folder(path: Path) -> list[str]:
    """Returns the names in a file's folder."""
    return [sibling.name for sibling in path.parent.iterdir()]


@pytest.fixture
def rows(tmp_path) -> Path:
    return write(tmp_path / "rows.hdf5", category_ids=np.array([4, 5, 6]))


def run(*arguments) -> int:
    return main(["token-types", *map(str, arguments)])


@pytest.mark.slow
def test_the_command_adds_types_and_changes_nothing_else(rows, capsys):
    assert run(rows, *BY_SEPARATOR) == 0
    printed = capsys.readouterr().out
    assert [int(x) for x in printed.splitlines()[3].split("│")[2:7]] == [3, 6, 4, 2, 3]
    actual = read(rows)
    assert actual == {
        "input_ids": ROWS.tolist(),
        "token_type_ids": EXPECTED,
        "category_ids": [4, 5, 6],
    }
    with h5py.File(rows) as file:
        assert file.attrs["made_by"] == b"hand"
        assert file["category_ids"].attrs["unit"] == "category_ids"
        types = data_set(file, "token_type_ids")
        assert (types.dtype, types.compression, types.maxshape) == (
            np.dtype("i4"),
            "gzip",
            (None, 5),
        )
    types = Hdf5Rows(rows).read(1, slice(None)).token_types
    assert types is not None and types.tolist() == EXPECTED[1]
    assert names_in_folder(rows) == ["rows.hdf5"]


@pytest.mark.slow
def test_prepare_adds_types_too(rows):
    assert main(["prepare", "--add-token-types", str(rows), *BY_SEPARATOR]) == 0
    assert read(rows)["token_type_ids"] == EXPECTED


def test_tokens_may_be_written_as_text(tmp_path, files):
    """Encodes with the small runs' tokenizer, in which each letter is a token."""
    pairs = [("ab=", "AB"), ("c=", "C=")]
    file = write_rows(tmp_path / "rows.hdf5", pairs, length=8)
    wanted = read(file)["token_type_ids"]
    rule = ("--until_first", "=", "--end", "EOS", "--padding", "PAD", "--replace")
    assert run(file, *rule, "--tokenizer", files.decoder) == 0
    assert read(file)["token_type_ids"] == wanted


@pytest.mark.parametrize(
    "rule", [("--all_completion",), ("--lengths", 2), ("--array", "types.npy")]
)
def test_an_option_that_a_rule_does_not_use_is_refused(rows, capsys, rule):
    assert run(rows, *rule, "--learn_others") == 2
    assert "--learn_others applies only with --until_last" in capsys.readouterr().err


@pytest.mark.slow
def test_existing_types_are_replaced_only_on_request(rows, capsys):
    add_token_types(rows, AllCompletion())
    before = rows.read_bytes()
    assert run(rows, *BY_SEPARATOR) == 2
    assert "already has token_type_ids; --replace" in capsys.readouterr().err
    assert rows.read_bytes() == before
    assert run(rows, *BY_SEPARATOR, "--replace") == 0
    assert read(rows)["token_type_ids"] == EXPECTED


def test_an_array_is_counted_through_several_files(tmp_path):
    files = [write(tmp_path / f"{name}.hdf5", ROWS[:2]) for name in "ab"]
    np.save(tmp_path / "types.npy", np.array([*EXPECTED, [1, 1, 1, 1, 1]]))
    assert run(*files, "--array", tmp_path / "types.npy") == 0
    assert read(files[0])["token_type_ids"] == EXPECTED[:2]
    assert read(files[1])["token_type_ids"] == [EXPECTED[2], [1, 1, 1, 1, 1]]


@pytest.mark.slow
def test_lengths_are_given_as_a_number_or_a_file(rows, tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.array([2, 3, 1]))
    ends = ("--end", 2, "--padding", 0)
    assert run(rows, "--lengths", tmp_path / "lengths.npy", *ends) == 0
    assert read(rows)["token_type_ids"] == EXPECTED
    assert run(rows, "--lengths", 5, *ends[2:], "--replace") == 0
    assert "3 rows have no learned token" in capsys.readouterr().out


def test_rows_of_several_blocks_are_all_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(row_sources, "ROWS_PER_BLOCK", 2)
    file = write(tmp_path / "many.hdf5", np.full((7, 3), 9, np.int32))
    (typed,) = add_token_types(file, PromptLengths(np.array([0, 1, 2, 3, 2, 1, 0])))
    assert typed.counts.tolist() == [9, 12, 0, 0] and typed.unlearned == 1
    assert [row.count(0) for row in read(file)["token_type_ids"]] == [
        0,
        1,
        2,
        3,
        2,
        1,
        0,
    ]


def test_the_types_of_prepared_rows_follow_from_a_rule(tmp_path):
    """The rows are single examples: prompt, completion, end and padding."""
    file = tmp_path / "rows.hdf5"
    file.write_bytes(TUNING.read_bytes())
    wanted = read(file)["token_type_ids"]
    lengths = [row.count(0) for row in wanted]
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    end = ("--end", END, "--padding", END, "--replace")
    assert run(file, "--lengths", tmp_path / "lengths.npy", *end) == 0
    assert read(file)["token_type_ids"] == wanted


def refused(capsys, *arguments) -> str:
    assert run(*arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_files_that_cannot_be_typed_are_refused_unchanged(rows, tmp_path, capsys):
    before = rows.read_bytes()
    other = write(tmp_path / "other.hdf5", np.array([[7, 7, 7, 2, 0]], np.int32))
    message = refused(capsys, rows, other, *BY_SEPARATOR)
    assert f"{other}: row 3: the example at token 0 has no separator (5)" in message
    np.save(tmp_path / "two.npy", np.zeros((2, 5), int))
    assert "is for 2 rows" in refused(capsys, rows, "--array", tmp_path / "two.npy")
    np.save(tmp_path / "flat.npy", np.zeros(3, int))
    message = refused(capsys, rows, "--array", tmp_path / "flat.npy")
    assert "shape (3,), expected [rows, length]" in message
    np.save(tmp_path / "real.npy", np.zeros((3, 5)))
    message = refused(capsys, rows, "--array", tmp_path / "real.npy")
    assert "contains float64, expected an array of integers" in message
    assert "is not a number" in refused(capsys, rows, "--until_last", "SEP")
    assert "named twice" in refused(capsys, rows, rows, "--all_completion")
    (tmp_path / "text.hdf5").write_text("id,text\n")
    message = refused(capsys, tmp_path / "text.hdf5", "--all_completion")
    assert "cannot be opened as HDF5" in message
    floats = write(tmp_path / "floats.hdf5", ROWS.astype("f4"))
    message = refused(capsys, floats, "--all_completion")
    assert "input_ids has type float32, expected an integer type" in message
    assert rows.read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["input_ids", "token_type_ids"])
def test_a_wrong_copy_replaces_nothing(rows, damaged, monkeypatch):
    before = rows.read_bytes()
    add = token_type_files._add_types

    def failing(path, temporary, *arguments):
        add(path, temporary, *arguments)
        with h5py.File(temporary, "a") as new:
            spoilt = data_set(new, damaged)
            spoilt[1, 2] = 1 - spoilt[1, 2]

    monkeypatch.setattr(token_type_files, "_add_types", failing)
    with pytest.raises(InputError, match="written next to it is wrong"):
        add_token_types(rows, GivenTypes(np.array(EXPECTED)))
    assert rows.read_bytes() == before
    assert names_in_folder(rows) == ["rows.hdf5"]


def test_everything_else_stays_as_it_is(tmp_path):
    path = write(tmp_path / "rows.hdf5", loss_weights=np.array([np.nan, 0.5, -0.0]))
    with h5py.File(path, "a") as file:
        file["group/deep/values"] = np.arange(4.0)
        file["variable"] = ["a", "bé", ""]
        file["reference"] = file["group/deep"].ref
        file.attrs["nothing"] = h5py.Empty("f4")
        file["token_type_ids"] = np.zeros((3, 5), np.int32)
    add_token_types(path, GivenTypes(np.array(EXPECTED)), replace=True)
    with h5py.File(path) as file:
        assert data_set(file, "token_type_ids")[:].tolist() == EXPECTED
        np.testing.assert_array_equal(data_set(file, "input_ids")[:], ROWS)
        weights = data_set(file, "loss_weights")
        np.testing.assert_array_equal(weights[:], [np.nan, 0.5, -0.0])
        assert weights.attrs["unit"] == "loss_weights"
        assert data_set(file, "variable")[:].tolist() == [b"a", "bé".encode(), b""]
        deep: Any = file[data_set(file, "reference")[()]]
        assert deep["values"][:].tolist() == [0, 1, 2, 3]
        assert file.attrs["made_by"] == b"hand" and "nothing" in file.attrs


def test_replacing_types_again_does_not_make_the_file_grow(rows):
    sizes = []
    for _ in range(4):
        add_token_types(rows, GivenTypes(np.array(EXPECTED)), replace=True)
        sizes.append(rows.stat().st_size)
    assert sizes[-1] == sizes[1]


@pytest.mark.parametrize("where", ["data", "attribute", "compound"])
def test_a_text_with_a_wrong_length_is_copied_as_it_is(where, tmp_path):
    """HDF5 2.0 never returns from a heap with a second text of this length."""
    path = tmp_path / "rows.hdf5"
    text = h5py.string_dtype()
    texts = np.array(["aa", "bbb", "c" * 40], object)
    with h5py.File(path, "w") as file:
        file["input_ids"] = ROWS
        if where == "data":
            file.create_dataset("texts", data=texts, dtype=text)
        elif where == "attribute":
            file.attrs.create("texts", texts, dtype=text)
        else:
            pairs = np.array([(each, 1) for each in texts], [("a", text), ("b", "i4")])
            file["group/deep/pairs"] = pairs
    content = path.read_bytes()
    length = content.index(b"\3" + bytes(7) + b"bbb")
    path.write_bytes(content[:length] + b"\xb5" + content[length + 1 :])
    add_token_types(path, GivenTypes(np.array(EXPECTED)))
    with h5py.File(path) as file:
        assert data_set(file, "token_type_ids")[:].tolist() == EXPECTED
    assert b"\xb5" + bytes(7) + b"bbb" in path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_leaves_the_old_file_or_the_new_one(rows, call, monkeypatch):
    """The process dies instead of the first or second call that syncs to disk."""
    before, calls = rows.read_bytes(), iter(range(1, 10))
    sync = token_type_files.sync_path

    def dying(path):
        if next(calls) == call:
            raise KeyboardInterrupt
        sync(path)

    monkeypatch.setattr(token_type_files, "sync_path", dying)
    with pytest.raises(KeyboardInterrupt):
        add_token_types(rows, GivenTypes(np.array(EXPECTED)))
    if call == 1:
        assert rows.read_bytes() == before
    else:
        assert read(rows)["token_type_ids"] == EXPECTED
