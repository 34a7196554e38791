"""Copies of HDF5 files whose values of variable length are damaged."""

import time

import h5py
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.tools import hdf5_copy
from prompt_tuning.data.tools.token_type_files import add_token_types
from prompt_tuning.data.tools.type_rules import AllCompletion


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "attribute", "compound"])
def test_a_text_with_a_wrong_length_does_not_hang(where, tmp_path, monkeypatch):
    """HDF5 2.0 never returns from a heap whose second text has this length."""
    path = tmp_path / "rows.hdf5"
    text = h5py.string_dtype()
    texts = np.array(["aa", "bbb", "c" * 40], object)
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.arange(1, 13).reshape(3, 4)
        if where == "data":
            file.create_dataset("texts", data=texts, dtype=text)
        elif where == "attribute":
            file.attrs.create("texts", texts, dtype=text)
        else:
            pairs = np.array([(each, 1) for each in texts], [("a", text), ("b", "i4")])
            file["group/deep/pairs"] = pairs
    content = path.read_bytes()
    length = content.index(b"\3" + bytes(7) + b"bbb")
    damaged = content[:length] + b"\xb5" + content[length + 1 :]
    path.write_bytes(damaged)
    monkeypatch.setattr(hdf5_copy, "MINIMUM_SECONDS", 1)
    start = time.process_time()
    with pytest.raises(InputError, match=r"rows\.hdf5 is unchanged, as it is damaged"):
        add_token_types(path, AllCompletion())
    assert time.process_time() - start < 10
    assert path.read_bytes() == damaged
    assert [each.name for each in tmp_path.iterdir()] == ["rows.hdf5"]
