"""The end of a preparation after a kill or power cut at each file-system call."""

from pathlib import Path

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.scratch_directory import open_scratch
from tests.support.crash_states import Tree, read_tree, recorded

IDENTITY = {"inputs": ["lines.jsonl"]}
DONE = {"out": None, "out/rows": b"new"}


def repeat(root: Path, state: Tree, *, force: bool) -> None:
    """Finishes a state, which is refused if all but a lock is done."""
    try:
        finish(root, force=force)
    except InputError:
        left = {x for x in state if not x.startswith(".out.preparing")}
        assert {name: state[name] for name in left} == DONE


def finish(root: Path, *, force: bool) -> None:
    """Publishes an output with one file, unless that was done before."""
    with open_scratch(root / "out") as scratch:
        if scratch.identity != IDENTITY or not scratch.is_published:
            if (root / "out").exists() and not force:
                raise InputError("it exists")
            if scratch.identity != IDENTITY:
                scratch.begin(IDENTITY)
            (scratch.create_new() / "rows").write_text("new")
            scratch.publish()
        scratch.remove()


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
def test_a_published_output_is_recognized_until_all_else_is_gone(replaces, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    if replaces:
        (root / "out").mkdir()
        (root / "out" / "rows").write_text("old")
    recording = recorded(root, lambda: finish(root, force=replaces))
    expected = read_tree(root)
    for folder, state in recording.written(tmp_path / "states"):
        if state != expected:
            repeat(folder, state, force=replaces)
        assert read_tree(folder) == expected == DONE


@pytest.mark.exhaustive
@pytest.mark.parametrize("replaces", [False, True])
def test_the_repetition_can_be_interrupted_too(replaces, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    if replaces:
        (root / "out").mkdir()
        (root / "out" / "rows").write_text("old")
    first = recorded(root, lambda: finish(root, force=replaces))
    expected, outcomes = read_tree(root), 0
    for number, (folder, state) in enumerate(first.written(tmp_path / "first")):
        if state == expected:
            continue
        again = recorded(folder, lambda at=folder: repeat(at, {}, force=replaces))
        for place, interrupted in again.written(tmp_path / f"second_{number}"):
            if interrupted != expected:
                repeat(place, interrupted, force=replaces)
            assert read_tree(place) == expected
            outcomes += 1
    print(f"{outcomes} states of two interruptions")
