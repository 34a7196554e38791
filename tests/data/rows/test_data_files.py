"""Names, globs and folders stand for files in a defined order."""

import re

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.rows.data_files import contains_text, list_files


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")
    return folder


def names(files, split="train"):
    return [path.name for path in list_files(files, split)]


def test_globs_are_sorted_and_names_keep_their_order(tmp_path):
    folder = str(touch(tmp_path, "b.jsonl", "a.jsonl", "c.csv"))
    assert names(f"{folder}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names([f"{folder}/b.jsonl", f"{folder}/a.jsonl"]) == ["b.jsonl", "a.jsonl"]
    assert names(f"{tmp_path}/**/*.csv") == ["c.csv"]


def test_a_name_with_brackets_is_a_file_if_it_exists(tmp_path):
    touch(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(str(tmp_path / "a[1].jsonl")) == ["a[1].jsonl"]


def test_a_folder_stands_for_its_data_files(tmp_path):
    folder = touch(tmp_path, "b.jsonl", "a.jsonl", "README.md", ".hidden.jsonl")
    assert names(str(folder)) == ["a.jsonl", "b.jsonl"]


def test_a_prepared_folder_stands_for_one_split_in_order(tmp_path):
    shards = [f"train_{i}_of_11.hdf5" for i in range(1, 12)]
    folder = touch(tmp_path, "metadata.yaml", "test.jsonl", *shards)
    touch(folder, "dev_1_of_1.hdf5")
    assert names(str(folder)) == shards
    assert names(str(folder), "dev") == ["dev_1_of_1.hdf5"]
    with pytest.raises(InputError, match=r"has no test_.*it has train, dev"):
        list_files(str(folder), "test")
    (folder / shards[3]).unlink()
    with pytest.raises(InputError, match="has 10 of the 11 files train_"):
        list_files(str(folder))


@pytest.mark.parametrize(
    ("made", "name", "message"),
    [
        ([], "a.jsonl", "data file .*a.jsonl not found"),
        (["a.csv"], "*.jsonl", "no file matches this pattern"),
        ([], "", r"contains no data file \(none\)"),
        (["README.md"], "", r"contains no data file \(none\)"),
        (["a.hdf5", "b.jsonl"], "", r"several kinds \(hdf5, .jsonl\), expected files"),
        (["a.csv", "b.jsonl"], "", "files of several kinds .* name the files, for"),
        (["train.csv", "dev.csv"], "", "contains files of several splits"),
        (["a.csv", "test-0.csv"], "", "contains files of several splits"),
    ],
)
def test_names_that_stand_for_no_data_are_refused(tmp_path, made, name, message):
    folder = touch(tmp_path / "data", *made)
    with pytest.raises(InputError, match=message):
        list_files(f"{folder}/{name}")


def test_no_file_is_read_twice(tmp_path):
    folder = touch(tmp_path, "a.jsonl", "b.jsonl")
    single, glob = f"{folder}/b.jsonl", f"{folder}/*.jsonl"
    for both in ([single, glob], [glob, single], [single, f"{folder}/b*"]):
        with pytest.raises(InputError, match=r"b.jsonl is named before, so its rows w"):
            list_files(both)
    assert names([single, single]) == ["b.jsonl", "b.jsonl"]


def test_files_are_of_one_kind(tmp_path):
    folder = touch(tmp_path, "a.jsonl", "b.csv", "c.h5", "d.HDF5", "e.txt")
    assert contains_text([folder / "a.jsonl"]) and contains_text([folder / "b.csv"])
    assert not contains_text([folder / "c.h5", folder / "d.HDF5"])
    for mixed in (["a.jsonl", "b.csv"], ["a.jsonl", "c.h5"], ["e.txt"]):
        with pytest.raises(InputError, match=re.escape("expected all of one kind")):
            contains_text([folder / name for name in mixed])
