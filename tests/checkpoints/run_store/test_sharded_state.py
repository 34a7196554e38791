"""Large trained state in Orbax's format: each process saves its own shards."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_files import ORBAX, named_leaves
from prompt_tuning.checkpoints.run_store.checkpoint_selection import best_or_latest
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.checkpoints.run_store.orbax_arrays import FOLDER, Writing
from prompt_tuning.core.errors import InputError, StorageError
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.array_placement import Placement
from tests.support import dummies, meshes
from tests.support.small_runs import Killed, kill_at_call

TABLE, KERNEL = "token_embedder/embedding", "decoder/layers/mlp/up/kernel"
PATHS = (TABLE, KERNEL, "decoder/final_norm/scale")
ALL = MeshShape(data=1, fsdp=2, tensor=4)
DYING = """
import os, signal, sys
from prompt_tuning.checkpoints.run_store.orbax_arrays import Writing
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from tests.checkpoints.run_store.test_sharded_state import save

store = CheckpointStore(sys.argv[1], form="orbax")
save(store, 1)
store.wait()
# In the background, with all arrays handed over and none of them in its place.
Writing.wait = lambda writing: os.kill(os.getpid(), signal.SIGKILL)
save(store, 2)
store.wait()
"""


def state_of(step: int):
    """Returns random trained leaves and a random optimizer state."""
    random = np.random.default_rng(step)
    shapes = {TABLE: (31, 16), KERNEL: (2, 16, 24), PATHS[2]: (16,)}
    trained = {
        path: jnp.asarray(random.standard_normal(shape), jnp.float32)
        for path, shape in shapes.items()
    }
    moments = optax.adam(0.1).init(trained)
    return trained, jax.tree.map(lambda x: x + step, moments)


def placed(shape: MeshShape) -> Placement:
    graph, parameters = dummies.unprompted(dummies.LLAMA)
    layout = meshes.layout_of(shape, dummies.LLAMA)
    return meshes.placed(layout, graph, parameters)


def save(store: CheckpointStore, step: int, where: Placement | None = None, **metrics):
    expected = state_of(step)
    state = expected if where is None else where.put_tree(expected)
    store.save_sharded(step, *state, {"a": [1, 2]}, shapes=expected, metrics=metrics)


def open_store(directory: Path, **choices) -> CheckpointStore:
    return CheckpointStore(directory, form=ORBAX, **choices)


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for actual_leaf, other in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(actual_leaf), np.asarray(other))


def assert_loads(store: CheckpointStore, step: int) -> None:
    trained, moments, extra = store.load(step, state_of(0)[1])
    assert_same((trained, moments), state_of(step))
    assert extra == {"a": [1, 2]}


def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path):
    store, expected = open_store(tmp_path), state_of(3)
    save(store, 3, placed(ALL), loss=2.0)
    store.wait()
    assert store.latest_valid() == 3
    # One device, in NumPy: the table has 31 rows, without the mesh's padding.
    assert_loads(store, 3)
    other = placed(MeshShape(data=1, fsdp=4))
    trained, moments, _ = store.load(3, expected[1], trained_template=expected[0])
    actual = other.put_tree((trained, moments))
    there = other.put_tree(expected)
    assert_same(actual, there)
    assert jax.tree.map(lambda x: x.sharding, actual) == jax.tree.map(
        lambda x: x.sharding, there
    )
    with pytest.raises(InputError, match=r"arrays \(was the optimizer changed\?\)"):
        store.load(3, {})


def test_the_largest_magnitudes_are_reduced_over_all_shards():
    where = placed(ALL)
    trained, _ = state_of(1)
    trained[TABLE] = trained[TABLE].at[30, 7].set(-40.0)
    trained[KERNEL] = trained[KERNEL].at[1, 5, 23].set(jnp.nan)
    state = where.put_tree(trained)
    actual = where.largest_magnitudes(state)
    assert float(actual[TABLE]) == 40.0
    # Only one device has the NaN, which compares as smaller than other numbers.
    assert np.isposinf(actual[KERNEL])
    program = where.largest_magnitudes.lower(state).compile().as_text()
    assert "all-reduce" in program
    assert "all-gather" not in program


def test_arrays_may_be_donated_once_they_are_being_saved(tmp_path):
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = jax.random.normal(jax.random.key(0), (2048, 1024))
    expected = np.array(array)
    store = open_store(tmp_path)
    leaves = {"a": array}
    store.save_sharded(1, leaves, (), {}, shapes=(leaves, ()))
    for _ in range(3):
        array = step(array)
    array.block_until_ready()
    store.wait()
    actual, _, _ = store.load(1, ())
    np.testing.assert_array_equal(np.asarray(actual["a"]), expected)
    # A smaller state would be saved as a prompt.
    np.testing.assert_array_equal(read_prompt(tmp_path), expected)


@pytest.mark.parametrize("damage", ["cut off", "missing", "changed"])
def test_a_damaged_checkpoint_is_skipped(damage, tmp_path):
    store, messages = open_store(tmp_path), []
    for step in (10, 20):
        save(store, step)
    store.wait()
    files = [x for x in (store.folder / "checkpoint_20" / FOLDER).rglob("d/*")]
    largest = max(files, key=lambda file: file.stat().st_size)
    if damage == "missing":
        largest.unlink()
    elif damage == "changed":
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    else:
        os.truncate(largest, largest.stat().st_size - 1)
    assert store.latest_valid(messages.append) == 10
    assert len(messages) == 1
    assert str(largest) in messages[0]
    assert "expected" in messages[0]
    assert_loads(store, 10)


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    save(store, 1)
    store.wait()

    def full(*_) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint_files, "seal_sharded", full)
    save(store, 2)
    with pytest.raises(StorageError, match=r"checkpoint_2 .*No space.*step 1 is k"):
        save(store, 3)
    monkeypatch.undo()
    # The error is raised once, and the incomplete save is removed.
    save(store, 3)
    store.close()
    assert [path.name for path in sorted(store.folder.iterdir())] == [
        "checkpoint_1",
        "checkpoint_3",
    ]


def test_a_kill_during_a_save_leaves_a_good_checkpoint(tmp_path, monkeypatch):
    survived = set()
    for call in range(1, 99):
        run = tmp_path / str(call)
        store = open_store(run, keep_last=1)
        save(store, 1)
        store.wait()
        with monkeypatch.context() as patched:
            # Every seventh call, since most only write one more of Orbax's files.
            kill_at_call(patched, 7 * call)
            save(store, 2)
            try:
                store.wait()
            except Killed:
                finished = False
            else:
                finished = True
        mended = open_store(run)
        step = mended.latest_valid()
        assert step in (1, 2)
        assert_loads(mended, step)
        assert not [x for x in mended.folder.iterdir() if "." in x.name]
        survived.add(step)
        if finished:
            break
    assert survived == {1, 2}


@pytest.mark.slow
def test_a_process_that_dies_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path)], env=environment, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    assert list((tmp_path / "numpy_checkpoints").glob("checkpoint_2.tmp-*"))
    store = open_store(tmp_path)
    assert [path.name for path in store.folder.iterdir()] == ["checkpoint_1"]
    assert store.latest_valid() == 1
    assert_loads(store, 1)


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    store = open_store(tmp_path, keep_last=2, keep_best=("loss", "min"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 2.0)):
        save(store, step, loss=loss)
    store.close()
    assert store.steps() == [2, 4, 5]
    assert best_or_latest(store.folder).name == "checkpoint_2"


def test_large_checkpoints_use_orbax():
    # float32 leaves with two moments each: 12 bytes per number.
    for rows, large in ((21, False), (22, True)):
        leaves = {"a": jax.ShapeDtypeStruct((rows, 2**20), jnp.float32)}
        moments = jax.eval_shape(optax.adam(0.1).init, leaves)
        assert checkpoint_files.is_sharded("auto", leaves, moments) == large
        assert checkpoint_files.is_sharded("orbax", leaves, moments)
        assert not checkpoint_files.is_sharded("numpy", leaves, moments)
    assert len(named_leaves(moments)) == 3
    with pytest.raises(InputError, match="form of checkpoints is 'zarr', expected"):
        CheckpointStore("nowhere", form="zarr")


# Orbax leaves an event loop open, which is garbage afterwards.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_write_is_raised_and_not_logged(tmp_path, caplog):
    """Files may have 100 bytes, as on a disk that is nearly full."""
    arrays = {"prompt": jnp.arange(10_000.0)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            Writing(tmp_path, {"trained": arrays}).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert [record.message for record in caplog.records] == []
