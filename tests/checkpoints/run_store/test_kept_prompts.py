"""Prompts of deleted checkpoints stay in the run directory."""

from typing import Literal

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import KEPT
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.checkpoints.run_store.kept_prompts import KeptPrompts
from tests.support.crash_states import read_tree, recorded

PROMPT, SCALE = "decoder/prompt/prompt", "decoder/final_norm/scale"


def store_in(run, count: int | Literal["all"] = "all", paths=(), form="auto"):
    kept = KeptPrompts(count, paths)
    return CheckpointStore(run, 1, ("loss", "min"), form=form, kept_prompts=kept)


def save(store, step):
    trained = {PROMPT: np.full((4, 6), step, np.float32), SCALE: np.ones(6, "f")}
    if store.is_sharded(trained, ()):
        arrays = jax.tree.map(jax.numpy.asarray, trained)
        metrics = {"loss": abs(step - 2.0)}
        store.save_sharded(step, arrays, (), {}, shapes=(trained, ()), metrics=metrics)
        store.wait()
    else:
        store.save(step, trained, (), {}, metrics={"loss": abs(step - 2.0)})


@pytest.mark.parametrize(
    "form", ["numpy", pytest.param("orbax", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("count", "kept"), [("all", [1, 3, 4]), (2, [3, 4]), (0, [])])
def test_prompts_of_deleted_checkpoints_are_kept(form, count, kept, tmp_path):
    store = store_in(tmp_path, count, form=form)
    for step in range(1, 6):
        save(store, step)
    assert (store.steps(), store.best(), store.latest_valid()) == ([2, 5], 2, 5)
    folders = {p.name: p for p in (tmp_path / KEPT).glob("*")}
    assert folders.keys() == {f"checkpoint_{step}" for step in kept}
    for step in kept:
        folder = folders[f"checkpoint_{step}"]
        expected = np.full((4, 6), step, np.float32)
        np.testing.assert_array_equal(read_prompt(folder), expected)
        np.testing.assert_array_equal(
            np.load(folder / "decoder.prompt.prompt.npy"), expected
        )
        assert not (folder / "decoder.final_norm.scale.npy").exists()


def test_further_parameters_are_kept_by_their_paths(tmp_path):
    store = store_in(tmp_path, paths=[".*/scale"])
    for step in (1, 2):
        save(store, step)
    scale = tmp_path / KEPT / "checkpoint_1" / "decoder.final_norm.scale.npy"
    np.testing.assert_array_equal(np.load(scale), np.ones(6))


def test_a_damaged_checkpoint_has_no_prompt_to_keep(tmp_path, caplog):
    store = store_in(tmp_path)
    save(store, 1)
    file = store.folder / "checkpoint_1" / "decoder.prompt.prompt.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    save(store, 2)
    assert (store.steps(), (tmp_path / KEPT).exists()) == ([2], False)
    assert "the prompts of step 1 are not kept" in caplog.text


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_each_step_a_checkpoint_or_its_prompt(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 3):
        save(store_in(run), step)
    recording = recorded(run, lambda: save(store_in(run), 4), ())
    expected = read_tree(run, ())
    outcomes = set()
    for folder, _ in recording.written(tmp_path / "states"):
        store = store_in(folder)
        latest = store.latest_valid()
        assert latest in (3, 4)
        prompts = {
            path.name: np.load(path / "decoder.prompt.prompt.npy")[0, 0]
            for path in [*store.folder.iterdir(), *(folder / KEPT).glob("*")]
        }
        for step in (2, 3, latest):
            assert prompts[f"checkpoint_{step}"] == step
        if latest == 4:
            store.finish_deletion(4)
        else:
            save(store, 4)
        assert read_tree(folder, ()) == expected
        outcomes.add(latest)
    assert outcomes == {3, 4}
