"""A run after a kill or power cut at each call to the file system."""

import dataclasses
import errno
import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.cli.main import split_bindings
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import StorageError
from prompt_tuning.training import compile_ahead, loop
from prompt_tuning.training.metrics_log import METRICS_FILE
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import LineReporter
from tests.support.crash_states import Tree, read_tree, recorded
from tests.support.exhaustive import sample

STEPS = 6
CLOCK = ("tokens_per_second", "data_wait_share")


@pytest.fixture(scope="module")
def train(files) -> Callable[[Path], None]:
    """A run that saves three times, compiled once for all directories."""
    choices = {"Run.steps": STEPS, "Run.save_every": 2, "Run.keep_last": 1}
    plain, bindings = split_bindings(files.arguments(Path("elsewhere"), **choices))
    trainer = open_run(read_run([plain[0].partition("=")[2]], bindings))

    def run(directory: Path) -> None:
        settings = dataclasses.replace(trainer.run, directory=str(directory / "run"))
        start = jax.tree.map(jnp.copy, trainer.start)
        loop.train(
            dataclasses.replace(trainer, run=settings, start=start),
            config="Run.steps = 6",
            make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS),
        )

    return run


def bits(root: Path) -> Tree:
    """Returns all names and contents; logs without times."""
    tree = read_tree(root, ("tensorboard",))
    for path in [path for path in tree if path.endswith(METRICS_FILE)]:
        lines = [json.loads(line) for line in (tree[path] or b"").splitlines()]
        entries = [{k: x for k, x in line.items() if k not in CLOCK} for line in lines]
        tree[path] = json.dumps(entries).encode()
    return tree


def fill_disk(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Lets the disk be full at a call of fsync, counted from 1, and after it."""
    calls, sync = itertools.count(1), os.fsync

    def full(descriptor: int) -> None:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.slow
@pytest.mark.parametrize("calls", sample(1, [(1, 6, 9, 14), range(1, 50)]))
def test_a_full_disk_keeps_the_last_good_state(calls, train, tmp_path, monkeypatch):
    """Every file of a run is synced, so that these are all of its writes."""
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    train(undisturbed)
    expected, failures = bits(undisturbed), 0
    for call in calls:
        place = tmp_path / str(call)
        place.mkdir()
        with monkeypatch.context() as patched:
            fill_disk(patched, call)
            try:
                train(place)
            except StorageError as error:
                assert "No space left on device" in str(error)
                assert str(place) in str(error)
                failures += 1
        damaged: list[str] = []
        CheckpointStore(place / "run").latest_valid(damaged.append)
        assert not damaged
        train(place)
        assert bits(place) == expected
    print(f"{failures} writes on a full disk")
    assert failures >= min(len(calls), 25)


def test_the_compiler_starts_after_imports_that_disturb_it(
    train, tmp_path, monkeypatch
):
    """While grain is imported, imports of other threads fail (`etils.epy`)."""
    imported = []

    def start(*arguments) -> ThreadPoolExecutor:
        imported.append("grain" in sys.modules)
        return ThreadPoolExecutor(*arguments)

    monkeypatch.setattr(compile_ahead, "ThreadPoolExecutor", start)
    monkeypatch.delitem(sys.modules, "grain", raising=False)
    train(tmp_path)
    assert imported == [True]


@pytest.mark.exhaustive
def test_a_run_ends_with_the_same_bits(train, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    recording = recorded(root, lambda: train(root), ("tensorboard",))
    expected = bits(root)
    for folder, _ in recording.written(tmp_path / "states"):
        train(folder)
        assert bits(folder) == expected
