"""A sweep's saves after a kill or power cut at each call to the file system."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.sweep.sweep_run import train_sweep
from tests.support.crash_states import recorded
from tests.sweep.test_sweep import bits, prepare

STEPS = 4


@pytest.fixture(scope="module")
def sweep(files) -> Callable[[Path], object]:
    """Two members that save twice, compiled once for all directories."""
    opened = prepare(
        files,
        "elsewhere",
        ["Run.seed=0,1"],
        **{
            "DataSource.buckets": 1,
            "Run.steps": STEPS,
            "Run.save_every": 2,
            "Run.keep_last": 1,
            "Run.data_seed": 0,
        },
    )

    def run(directory: Path) -> None:
        members = []
        for member in opened.members:
            settings = dataclasses.replace(
                member.trainer.run, directory=str(directory / member.name)
            )
            start = jax.tree.map(jnp.copy, member.trainer.start)
            trainer = dataclasses.replace(member.trainer, run=settings, start=start)
            members.append(dataclasses.replace(member, trainer=trainer))
        train_sweep(
            dataclasses.replace(opened, directory=directory, members=tuple(members)),
            make_reporter=lambda done: LineReporter(Console(quiet=True), STEPS),
        )

    return run


@pytest.mark.exhaustive
def test_a_sweep_ends_with_the_same_bits(sweep, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    recording = recorded(root, lambda: sweep(root), ("tensorboard",))
    expected = bits(root)
    for folder, _ in recording.written(tmp_path / "states"):
        sweep(folder)
        assert bits(folder) == expected
