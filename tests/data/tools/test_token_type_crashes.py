"""Added token types after a kill or power cut at each call to the file system."""

from pathlib import Path

import h5py
import numpy as np

from prompt_tuning.data.tools.token_type_files import add_token_types
from prompt_tuning.data.tools.type_rules import AllCompletion, PromptLengths
from tests.support.crash_states import recorded

IDS = np.arange(1, 13).reshape(3, 4)


def typed(path: Path) -> list[list[int]]:
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["input_ids"], IDS)
        return np.asarray(file["token_type_ids"]).tolist()


def replace(folder: Path) -> None:
    add_token_types([folder / "rows.hdf5"], AllCompletion(), replace=True)


def test_types_are_the_old_or_the_new_ones(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with h5py.File(root / "rows.hdf5", "w") as file:
        file["input_ids"] = IDS
    add_token_types([root / "rows.hdf5"], PromptLengths(np.array([1, 1, 1])))
    old = typed(root / "rows.hdf5")
    recording = recorded(root, lambda: replace(root))
    new = typed(root / "rows.hdf5")
    assert old == [[0, 1, 1, 1]] * 3 and new == [[1] * 4] * 3
    outcomes = []
    for folder, _ in recording.written(tmp_path / "states"):
        outcomes.append(typed(folder / "rows.hdf5"))
        replace(folder)
        assert typed(folder / "rows.hdf5") == new
        assert [path.name for path in folder.iterdir()] == ["rows.hdf5"]
    assert old in outcomes and new in outcomes
    assert all(outcome in (old, new) for outcome in outcomes)
