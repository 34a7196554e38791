import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import InputError

PATH = "encoder/prompt/prompt"
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
SYSTEM_CALLS = ("fsync", "rename", "mkdir", "unlink", "rmdir", "open", "close")


class Killed(BaseException):
    pass


def trained_at(step: int) -> dict[str, jax.Array]:
    return {PATH: jax.random.normal(jax.random.key(step), (4, 6))}


def optimizer_at(step: int):
    trained = trained_at(step)
    state = OPTIMIZER.init(trained)
    return OPTIMIZER.update(trained, state, trained)[1]


TEMPLATE = jax.eval_shape(lambda: optimizer_at(0))


def extra_at(step: int) -> dict:
    return {"key": [0, step], "examples": 16 * step, "fingerprint": "f00d"}


def save(store: CheckpointStore, step: int, content: int | None = None, **metrics):
    content = step if content is None else content
    return store.save(
        step,
        trained_at(content),
        optimizer_at(content),
        extra_at(content),
        metrics=metrics,
    )


def assert_loads(store: CheckpointStore, step: int, content: int | None = None):
    content = step if content is None else content
    trained, optimizer, extra = store.load(step, TEMPLATE)
    assert trained.keys() == {PATH}
    np.testing.assert_array_equal(trained[PATH], trained_at(content)[PATH])
    expected = optimizer_at(content)
    assert jax.tree.structure(optimizer) == jax.tree.structure(expected)
    for actual, leaf in zip(
        jax.tree.leaves(optimizer), jax.tree.leaves(expected), strict=True
    ):
        assert actual.dtype == leaf.dtype
        np.testing.assert_array_equal(actual, leaf)
    assert extra == extra_at(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_state_is_loaded_bit_for_bit(tmp_path):
    directory = save(CheckpointStore(tmp_path), 10)
    assert directory == tmp_path / "numpy_checkpoints" / "checkpoint_10"
    assert names(directory) == [
        "encoder.prompt.prompt.npy",
        "optimizer.npz",
        "state.json",
    ]
    assert_loads(CheckpointStore(tmp_path), 10)


def test_the_trained_leaf_is_a_plain_float32_numpy_file(tmp_path):
    directory = save(CheckpointStore(tmp_path), 10)
    prompt = np.load(directory / "encoder.prompt.prompt.npy", allow_pickle=False)
    assert prompt.dtype == np.float32
    np.testing.assert_array_equal(prompt, trained_at(10)[PATH])


def test_the_same_state_is_saved_as_the_same_bytes(tmp_path):
    first, second = (save(CheckpointStore(tmp_path / name), 10) for name in "ab")
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_every_kind_of_optimizer_leaf_is_kept(tmp_path):
    state = {
        "count": jnp.int32(7),
        "flags": np.array([True, False]),
        "wide": np.arange(3, dtype=np.uint8),
        "half": np.array([[1.5]], np.float16),
        "double": np.float64(1 / 3),
        "nested/name": (np.zeros((0, 2), np.float32), [np.int64(2**62)]),
        "nothing": None,
    }
    store = CheckpointStore(tmp_path)
    store.save(1, trained_at(1), state, {})
    _, loaded, _ = store.load(1, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for actual, leaf in zip(
        jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True
    ):
        assert (actual.dtype, actual.shape) == (leaf.dtype, leaf.shape)
        np.testing.assert_array_equal(actual, leaf)


def test_a_run_directory_without_checkpoints_is_not_created(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    assert store.steps() == []
    assert store.latest_valid() is None
    assert store.best() is None
    assert not (tmp_path / "run").exists()


def test_the_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (5, 10, 100, 20):
        save(store, step)
    # 100 is above the last saved step: it belongs to an abandoned branch of the run.
    assert store.steps() == [10, 20, 100]
    save(store, 200)
    assert store.steps() == [100, 200]
    assert store.latest_valid() == 200


@pytest.mark.parametrize(("direction", "best"), [("min", 2), ("max", 3)])
def test_the_best_checkpoint_is_kept_too(direction, best, tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=("loss", direction))
    for step, loss in enumerate((3.0, 2.0, 1.0, 4.0, 2.0, 2.0)):
        save(store, step, loss=loss)
    save(store, 6)
    assert store.best() == best
    assert store.steps() == [best, 6]


def test_a_step_saved_again_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    save(store, 10, content=11)
    assert names(store.folder) == ["checkpoint_10"]
    assert_loads(store, 10, content=11)


def kill_at(monkeypatch, moment: int, after: bool) -> None:
    """Simulates the end of the process at a file-system call, or right after it."""
    calls = 0

    def wrap(call):
        def counted(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls < moment:
                return call(*arguments, **keywords)
            if calls == moment and after:
                call(*arguments, **keywords)
            raise Killed

        return counted

    for name in SYSTEM_CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "new", [pytest.param(30, id="next step"), pytest.param(20, id="same step")]
)
def test_a_kill_at_any_time_leaves_the_old_or_the_new_checkpoint(new, after, tmp_path):
    before = tmp_path / "before"
    for step in (10, 20):
        save(CheckpointStore(before, keep_last=2), step)
    outcomes = []
    for moment in range(1, 200):
        run = tmp_path / str(moment)
        shutil.copytree(before, run)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, moment, after)
            try:
                save(CheckpointStore(run, keep_last=2), new, content=99)
            except Killed:
                survived = False
            else:
                survived = True
        store, messages = CheckpointStore(run, keep_last=2), []
        step = store.latest_valid(messages.append)
        assert messages == []
        assert step is not None and step in (20, new)
        prompt = store.load(step, TEMPLATE)[0][PATH]
        content = 99 if np.array_equal(prompt, trained_at(99)[PATH]) else 20
        assert_loads(store, step, content)
        assert names(store.folder) == [f"checkpoint_{each}" for each in store.steps()]
        assert [store.load(each, TEMPLATE)[2] for each in store.steps()]
        outcomes.append(content)
        save(store, 40)
        assert store.latest_valid(messages.append) == 40
        if survived:
            break
    assert survived
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {20, 99}
    assert len(outcomes) > 10


def test_a_kill_during_repair_loses_nothing(tmp_path):
    before = tmp_path / "before"
    store = CheckpointStore(before)
    save(store, 20)
    (store.folder / "checkpoint_20").rename(store.folder / "checkpoint_20.old")
    shutil.copytree(
        store.folder / "checkpoint_20.old", store.folder / "checkpoint_20.tmp-1"
    )
    for moment in range(1, 100):
        run = tmp_path / str(moment)
        shutil.copytree(before, run)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, moment, after=False)
            try:
                CheckpointStore(run)
            except Killed:
                survived = False
            else:
                survived = True
        assert_loads(CheckpointStore(run), 20)
        if survived:
            break
    assert survived
    assert moment > 5


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_remove(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_remove])
@pytest.mark.parametrize("name", ["encoder.prompt.prompt.npy", "optimizer.npz"])
def test_a_damaged_newest_is_reported_and_the_previous_used(damage, name, tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    damage(save(store, 20) / name)
    messages = []
    assert store.latest_valid(messages.append) == 10
    assert len(messages) == 1
    assert f"checkpoint_20/{name} is " in messages[0]
    assert "expected" in messages[0]
    assert_loads(store, 10)
    with pytest.raises(InputError, match=name):
        store.load(20, TEMPLATE)


@pytest.mark.slow
def test_any_flipped_byte_of_the_state_is_detected_or_harmless(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    path = save(store, 20) / "state.json"
    content = path.read_bytes()
    count = 0
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        messages = []
        step = store.latest_valid(messages.append)
        if step == 10:
            count += 1
            assert "checkpoint_20/state.json" in messages[0]
        else:
            assert_loads(store, 20)
    white_space = sum(byte in b" \n" for byte in content)
    assert count >= len(content) - white_space


def test_a_truncated_state_is_detected(tmp_path):
    store = CheckpointStore(tmp_path)
    path = save(store, 20) / "state.json"
    content = path.read_bytes()
    for length in range(0, len(content) - 2, 7):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="damaged"):
            store.load(20, TEMPLATE)


def test_all_damaged_is_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        damage_flip(save(store, step) / "optimizer.npz")
    with pytest.raises(InputError, match=r"all checkpoints .* damaged .*\[10, 20\]"):
        store.latest_valid([].append)


def test_the_only_good_checkpoint_is_not_pruned_for_a_damaged_newer_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    shutil.copytree(store.folder / "checkpoint_10", store.folder / "checkpoint_30")
    damage_flip(store.folder / "checkpoint_30" / "optimizer.npz")
    save(store, 20)
    assert store.latest_valid([].append) == 20


def test_a_damaged_best_checkpoint_is_reported_and_the_next_best_used(tmp_path):
    store = CheckpointStore(tmp_path, keep_best=("loss", "min"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(store, step, loss=loss)
    damage_flip(store.folder / "checkpoint_2" / "encoder.prompt.prompt.npy")
    messages = []
    assert store.best(messages.append) == 3
    assert "checkpoint_2/encoder.prompt.prompt.npy" in messages[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (optax.sgd(0.1).init(trained_at(1)), r"has no use for .*mu"),
        (
            OPTIMIZER.init({PATH: jnp.zeros((5, 6))}),
            r"shape \(4, 6\) .* expected \(5, 6\)",
        ),
        (
            jax.tree.map(lambda x: np.asarray(x, np.float16), optimizer_at(1)),
            "dtype int32, expected .* float16",
        ),
        (OPTIMIZER.init({"other": jnp.zeros((4, 6))}), "needs the leaves .*other"),
    ],
    ids=["other optimiser", "other shape", "other dtype", "other path"],
)
def test_another_optimizer_is_refused(template, message, tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(InputError, match=message):
        store.load(1, template)


def test_another_trained_leaf_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.load(1, TEMPLATE, trained_template=trained_at(2))
    with pytest.raises(InputError, match=r"shape \(4, 6\).*expected \(4, 7\)"):
        store.load(1, TEMPLATE, trained_template={PATH: np.zeros((4, 7), np.float32)})


def test_bfloat16_is_refused_and_nothing_is_written(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    half = {PATH: jnp.zeros((4, 6), jnp.bfloat16)}
    with pytest.raises(InputError, match=r"encoder/prompt/prompt is bfloat16"):
        store.save(1, half, (), {})
    with pytest.raises(InputError, match=r"optimizer leaf .* is bfloat16"):
        store.save(1, trained_at(1), half, {})
    assert not (tmp_path / "run").exists()


def test_paths_that_would_share_a_file_are_refused(tmp_path):
    trained = {"a/b": np.zeros(2, np.float32), "a.b": np.zeros(2, np.float32)}
    with pytest.raises(InputError, match=r"both be written as a\.b\.npy"):
        CheckpointStore(tmp_path).save(1, trained, (), {})
    with pytest.raises(InputError, match="cannot become a file name"):
        CheckpointStore(tmp_path).save(1, {"../up": np.zeros(2, np.float32)}, (), {})


def test_a_state_that_is_not_json_is_refused_and_the_old_one_stays(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    for wrong in ({"loss": float("nan")}, {"key": np.zeros(2)}):
        with pytest.raises(InputError, match="finite JSON"):
            store.save(1, trained_at(2), optimizer_at(2), wrong)
    assert_loads(CheckpointStore(tmp_path), 1)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "prompt_tuning.checkpoints.run_store.checkpoint_files.FORMAT", 2
    )
    directory = save(CheckpointStore(tmp_path), 1)
    monkeypatch.undo()
    assert json.loads((directory / "state.json").read_text())["format"] == 2
    with pytest.raises(InputError, match="format 2, this version reads 1"):
        CheckpointStore(tmp_path).load(1, TEMPLATE)


@pytest.mark.parametrize(
    ("keep_last", "keep_best"), [(0, None), (1, ("loss", "least"))]
)
def test_impossible_settings_are_refused(keep_last, keep_best, tmp_path):
    with pytest.raises(InputError, match=r"^keep_(last|best) is .*, expected"):
        CheckpointStore(tmp_path, keep_last, keep_best)
