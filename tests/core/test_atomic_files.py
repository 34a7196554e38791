import os
from pathlib import Path

import pytest

from prompt_tuning.core import atomic_files
from prompt_tuning.core.atomic_files import (
    exchange,
    replace_file,
    write_file,
    write_folder,
)
from prompt_tuning.core.errors import InputError, StorageError
from tests.support.crash_states import recorded, write_tree


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def write(text: str):
    return lambda folder: (folder / "file").write_text(text) and None


def fill(folder: Path, text: str) -> None:
    write_folder(folder, write(text), known=("file",), force=True)


@pytest.fixture(params=["exchange", "two renames"])
def system(request, monkeypatch) -> str:
    """Covers Linux, and a system that cannot exchange names."""
    if request.param == "two renames":
        monkeypatch.setattr(atomic_files, "exchange", lambda *_: False)
    return request.param


@pytest.mark.parametrize("before", [None, "old"])
def test_a_folder_is_old_or_new_after_every_end_of_the_process(
    before, system, tmp_path
):
    root = tmp_path / "root"
    root.mkdir()
    if before:
        fill(root / "folder", before)
    recording = recorded(root, lambda: fill(root / "folder", "new"))
    states = [*recording.killed_states(), *recording.power_cut_states()]
    assert len(states) > 20
    for number, state in enumerate(states):
        folder = write_tree(tmp_path / str(number), state)
        content = state.get("folder/file")
        if system == "exchange":
            # Other programs see a complete folder at any time.
            assert content in (before and b"old", b"new")
        if before and content != b"new":
            with pytest.raises(InputError, match="--force replaces"):
                write_folder(folder / "folder", write("new"), known=("file",))
            assert (folder / "folder" / "file").read_text() == "old"
        fill(folder / "folder", "new")
        assert contents(folder) == {"folder/file": "new"}
        assert [path.name for path in folder.iterdir()] == ["folder"]


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_old_or_new_after_every_end_of_the_process(before, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    if before:
        (root / "file").write_text(before)
    recording = recorded(root, lambda: replace_file(root / "file", "new"))
    for number, state in enumerate(
        [*recording.killed_states(), *recording.power_cut_states()]
    ):
        assert state.get("file") in (before and b"old", b"new")
        folder = write_tree(tmp_path / str(number), state)
        replace_file(folder / "file", "new")
        assert contents(folder) == {"file": "new"}


def test_unsynced_data_may_be_lost(tmp_path):
    """Facts about disks that the enumeration of states must contain."""

    def careless() -> None:
        (tmp_path / "temporary").write_text("content")
        (tmp_path / "temporary").rename(tmp_path / "file")

    states = recorded(tmp_path, careless).power_cut_states()
    for state in ({}, {"temporary": b""}, {"file": b""}, {"file": b"content"}):
        assert state in states


def test_names_are_exchanged(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    (one / "first").touch()
    other.mkdir()
    assert exchange(one, other)
    assert (other / "first").exists() and not any(one.iterdir())
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "missing")


def test_a_folder_that_another_process_fills_is_not_lost(tmp_path):
    def meanwhile(folder: Path) -> None:
        (folder / "file").write_text("mine")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "theirs").write_text("theirs")

    with pytest.raises(InputError, match="contains theirs, which would be lost"):
        write_folder(tmp_path / "folder", meanwhile)
    assert contents(tmp_path) == {"folder/theirs": "theirs"}


def test_two_writers_of_one_folder(tmp_path):
    def again(_: Path) -> None:
        fill(tmp_path / "folder", "second")

    with pytest.raises(InputError, match=f"is being written by process {os.getpid()}"):
        write_folder(tmp_path / "folder", again)
    assert not any(tmp_path.iterdir())


def test_temporary_files_of_a_killed_write_are_removed(tmp_path):
    (tmp_path / ".file.123.tmp").write_text("half")
    (tmp_path / ".other.123.tmp").write_text("of another file")
    replace_file(tmp_path / "file", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".other.123.tmp",
        "file",
    ]


def test_a_file_that_is_being_written_is_not_cleared(tmp_path):
    with (tmp_path / ".file.123.tmp").open("w") as opened:
        atomic_files._mark_as_used(opened)
        replace_file(tmp_path / "file", "whole")
        assert (tmp_path / ".file.123.tmp").exists()


@pytest.mark.parametrize(
    ("number", "error"), [(28, StorageError), (122, StorageError), (13, InputError)]
)
def test_errors_of_the_disk_name_the_file(number, error, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=os.strerror(number)) as raised:
        write_file(tmp_path / "file", "new", force=True)
    assert str(raised.value).startswith(str(tmp_path / "file"))
    assert contents(tmp_path) == {"file": "old"}


@pytest.mark.parametrize("name", ["", ".", "/", "a/.."])
def test_a_folder_without_a_name_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="has no name: name a new folder"):
        write_folder(Path(name), write("new"))
    assert not list(tmp_path.iterdir())
