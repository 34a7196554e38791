"""Lines that several starts of a command write together."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.resumable_lines import (
    partial_file,
    resumable_lines,
    settings_file,
)
from tests.support.crash_states import recorded, write_tree

LINES = ["one", "two and a half", "", "drei"]
SETTINGS = {"model": "a", "biases": {5: 1.5}}


def write(file, settings=None, *, force: bool = False, lines=LINES) -> int:
    """Writes the lines that are missing; returns the number of the others."""
    settings = SETTINGS if settings is None else settings
    with resumable_lines(file, settings, lambda _: True, force=force) as writer:
        done = len(lines) if writer.complete else writer.done
        for line in lines[done:]:
            writer.write(line)
    return done


def content(lines=LINES) -> str:
    return "".join(f"{line}\n" for line in lines)


class Stop(Exception):
    """Leaves the lines unfinished."""


def interrupt(file, count: int, settings=None) -> None:
    """Writes some lines, and stops."""
    settings = SETTINGS if settings is None else settings
    with (
        pytest.raises(Stop),
        resumable_lines(file, settings, lambda _: True) as writer,
    ):
        for line in LINES[:count]:
            writer.write(line)
        raise Stop


def test_every_cut_of_the_partial_file_is_continued_to_the_same_bytes(tmp_path):
    whole = content().encode()
    for size in range(len(whole) + 1):
        file = tmp_path / f"{size}.txt"
        interrupt(file, len(LINES))
        assert partial_file(file).read_bytes() == whole
        partial_file(file).write_bytes(whole[:size])
        # Only complete lines are kept.
        assert write(file) == whole[:size].count(b"\n")
        assert file.read_bytes() == whole
        assert sorted(tmp_path.glob(f"{size}.txt*")) == [file]


@pytest.mark.parametrize("before", [False, True])
def test_every_end_of_the_process_and_of_the_power_is_continued(before, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    if before:
        (root / "out").write_text("old")
    recording = recorded(root, lambda: write(root / "out", force=before) and None)
    states = [*recording.killed_states(), *recording.power_cut_states()]
    assert len(states) > 10
    for number, state in enumerate(states):
        file = write_tree(tmp_path / str(number), state) / "out"
        if file.exists():
            assert file.read_text() in ("old" if before else "", content())
        if before and file.read_text() == "old" and not settings_file(file).exists():
            with pytest.raises(InputError, match="--force replaces"):
                write(file)
            write(file, force=True)
        elif not file.exists() or settings_file(file).exists():
            write(file)
        assert file.read_text() == content(), state


def test_other_settings_and_unknown_files_are_not_continued(tmp_path):
    file = tmp_path / "out"
    interrupt(file, 2)
    other = {"model": "b", "biases": {5: 1.5}}
    with pytest.raises(InputError, match=r"model .*now .b.*--force") as found:
        write(file, other)
    assert "biases" not in str(found.value)
    assert partial_file(file).read_text() == content(LINES[:2])
    kept = settings_file(file).read_bytes()
    settings_file(file).unlink()
    with pytest.raises(InputError, match="settings is missing"):
        write(file)
    settings_file(file).write_bytes(kept)
    assert write(file, other, force=True) == 0
    assert file.read_text() == content()
    with pytest.raises(InputError, match="already exists"):
        write(file)


def test_a_line_that_is_not_accepted_and_those_after_it_are_written_anew(tmp_path):
    file = tmp_path / "out"
    interrupt(file, 4)

    def accepts(line: bytes) -> bool:
        return not line.startswith(b"two")

    with resumable_lines(file, SETTINGS, accepts) as writer:
        assert writer.done == 1
        for line in LINES[1:]:
            writer.write(line)
    assert file.read_text() == content()


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    file = tmp_path / "out"
    with (
        pytest.raises(InputError, match="already exists"),
        resumable_lines(file, SETTINGS, lambda _: True) as writer,
    ):
        writer.write("one")
        file.write_text("mine")
    assert file.read_text() == "mine"
    assert partial_file(file).read_text() == "one\n"


def test_two_commands_do_not_write_one_file(tmp_path):
    file = tmp_path / "out"
    with (
        resumable_lines(file, SETTINGS, lambda _: True),
        pytest.raises(InputError, match="is being written by process"),
    ):
        write(file)
