"""Checkpoints after a kill or power cut at each call to the file system."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.training.metrics_log import MetricsLog
from tests.support.crash_states import read_tree, recorded

TENSORBOARD = ("tensorboard",)


def leaves(content: int):
    trained = {"decoder/prompt/prompt": np.full((4, 6), content, np.float32)}
    return trained, {"mean": np.arange(3, dtype=np.float32) + content}


def loaded(store: CheckpointStore, step: int) -> int:
    """Verifies a checkpoint and returns its content."""
    trained, moments, extra = store.load(step, leaves(0)[1])
    content = extra["content"]
    expected = leaves(content)
    for path, leaf in expected[0].items():
        np.testing.assert_array_equal(np.asarray(trained[path]), leaf)
    np.testing.assert_array_equal(np.asarray(moments["mean"]), expected[1]["mean"])
    return content


def save(run: Path, step: int, content: int) -> None:
    """Opens a run's checkpoints and log, as a start does, and saves a checkpoint."""
    store = CheckpointStore(run, keep_last=2)
    log = MetricsLog(run, step - 1)
    log.write(step, {"loss": float(content)})
    log.sync()
    store.save(step, *leaves(content), {"content": content})
    log.close()


def newest(store: CheckpointStore) -> int | None:
    damaged: list[str] = []
    step = store.latest_valid(damaged.append)
    assert not damaged
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "content"),
    [pytest.param(3, 3, id="next step"), pytest.param(2, 9, id="same step")],
)
def test_a_save_ends_with_the_same_bits(step, content, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for before in (1, 2):
        save(run, before, before)
    recording = recorded(run, lambda: save(run, step, content), TENSORBOARD)
    expected = read_tree(run, TENSORBOARD)
    outcomes = set()
    for folder, _ in recording.written(tmp_path / "states"):
        store = CheckpointStore(folder, keep_last=2)
        newest_step = newest(store)
        assert newest_step is not None and newest_step in (2, step)
        outcomes.add(loaded(store, newest_step))
        # Every checkpoint has the lines of the steps before it.
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        logged = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
        covered = step if loaded(store, newest_step) == content else step - 1
        assert logged[:covered] == list(range(1, covered + 1))
        if newest_step == step and content == 3:
            store.finish_deletion(newest_step)
        else:
            save(folder, step, content)
        assert read_tree(folder, TENSORBOARD) == expected
    assert outcomes == {2, content}


def test_a_first_save_ends_with_the_same_bits(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    recording = recorded(run, lambda: save(run, 1, 1), TENSORBOARD)
    expected = read_tree(run, TENSORBOARD)
    for folder, _ in recording.written(tmp_path / "states"):
        assert newest(CheckpointStore(folder, keep_last=2)) in (None, 1)
        save(folder, 1, 1)
        assert read_tree(folder, TENSORBOARD) == expected


def save_sharded(run: Path, step: int) -> None:
    store = CheckpointStore(run, keep_last=1, form="orbax")
    trained, moments = jax.tree.map(jnp.asarray, leaves(step))
    shapes = (trained, moments)
    store.save_sharded(step, trained, moments, {"content": step}, shapes=shapes)
    store.wait()


@pytest.mark.exhaustive
def test_a_save_in_orbaxs_format_ends_with_the_same_content(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    save_sharded(run, 1)
    recording = recorded(run, lambda: save_sharded(run, 2))
    outcomes = set()
    for folder, _ in recording.written(tmp_path / "states"):
        store = CheckpointStore(folder, keep_last=1, form="orbax")
        newest_step = newest(store)
        assert newest_step is not None and newest_step in (1, 2)
        outcomes.add(loaded(store, newest_step))
        store.finish_deletion(newest_step)
        assert [path.name for path in store.folder.iterdir()] == [
            f"checkpoint_{newest_step}"
        ]
    assert outcomes == {1, 2}
    save_sharded(tmp_path / "again", 2)


def test_a_deletion_that_was_killed_is_finished(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2, 3):
        save(run, step, step)
    content_before = read_tree(run)
    save(run, 4, 4)
    shutil.copytree(run / "numpy_checkpoints" / "checkpoint_4", tmp_path / "newest")
    shutil.rmtree(run / "numpy_checkpoints")
    for path, content in content_before.items():
        if path.startswith("numpy_checkpoints"):
            target = run / path
            target.mkdir() if content is None else target.write_bytes(content)
    (tmp_path / "newest").rename(run / "numpy_checkpoints" / "checkpoint_4")
    store = CheckpointStore(run, keep_last=2)
    assert store.steps() == [2, 3, 4]
    store.finish_deletion(4)
    assert store.steps() == [3, 4]
