"""Files of `torch.save` are read without running their pickle."""

import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from prompt_tuning.checkpoints.formats.torch_archive import read_torch_archive
from prompt_tuning.core.errors import InputError

# torch is only in the `bench` extra.
# pyright: reportMissingImports=false

FIXTURE = Path(__file__).parents[2] / "fixtures" / "torch_tensors.bin"
"""Written by PyTorch 2.13 from `saved`."""


def saved():
    import torch

    table = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {
        "table": table,
        "columns": table.T,
        "part": table[1:, 1:3],
        "half": table.half(),
        "brain": table.bfloat16(),
        "parameter": torch.nn.Parameter(table * 2),
        "empty": torch.zeros(0, 4),
    }


def check(found):
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(found["table"], table)
    np.testing.assert_array_equal(found["columns"], table.T)
    np.testing.assert_array_equal(found["part"], table[1:, 1:3])
    np.testing.assert_array_equal(found["half"], table.astype(np.float16))
    assert found["half"].dtype == np.float16
    np.testing.assert_array_equal(found["brain"], table.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(found["parameter"], table * 2)
    assert found["empty"].shape == (0, 4)


def test_tensors_of_torch_are_read():
    check(read_torch_archive(FIXTURE))


@pytest.mark.torch
def test_what_torch_saves_now_is_read(tmp_path):
    import torch

    torch.save(saved(), tmp_path / "tensors.bin")
    check(read_torch_archive(tmp_path / "tensors.bin"))
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "module.bin")
    assert read_torch_archive(tmp_path / "module.bin")["weight"].shape == (3, 2)


def with_pickle(path, content):
    """Writes the fixture with another pickle."""
    with zipfile.ZipFile(FIXTURE) as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            changed = member.filename.endswith("/data.pkl")
            new.writestr(member, content if changed else old.read(member))
    return path


class Dangerous:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_functions_are_not_called(tmp_path):
    content = pickle.dumps({"a": Dangerous(tmp_path / "made")}, protocol=2)
    file = with_pickle(tmp_path / "tensors.bin", content)
    with pytest.raises(InputError, match="no tensor needs"):
        read_torch_archive(file)
    assert not (tmp_path / "made").exists()


def original() -> bytes:
    with zipfile.ZipFile(FIXTURE) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith("/data.pkl"))
        return archive.read(name)


DAMAGED = {
    "a list": (pickle.dumps([1, 2], protocol=2), "expected a dictionary of tensors"),
    "bytes": (pickle.dumps(b"ab", protocol=3), "no tensor needs"),
    "another object": (
        b"\x80\x02cbuiltins\nobject\n)\x81.",
        "builds an object that no tensor needs",
    ),
    "numbers": (pickle.dumps({"a": 1}, protocol=2), "expected a dictionary of tensors"),
    "half of it": (original()[:100], "not an archive of tensors"),
    # The shape (3, 4) with 100 rows.
    "a large shape": (
        original().replace(b"K\x03K\x04\x86", b"K\x64K\x04\x86"),
        "larger|passes",
    ),
    # Strides of 200 numbers.
    "large strides": (
        original().replace(b"K\x04K\x01\x86", b"K\xc8K\x01\x86"),
        "passes the end",
    ),
}


def test_a_tuple_that_doubles_sixty_times_is_refused_at_once(tmp_path):
    # Hashing or printing it visits 2 ** 60 tuples.
    doubled = b"".join(bytes([*b"q", i, *b"h", i, 0x86]) for i in range(60))
    content = b"\x80\x02}K\x01\x85" + doubled + b"K\x01s."
    with pytest.raises(InputError, match="more than once"):
        read_torch_archive(with_pickle(tmp_path / "tensors.bin", content))


DEEP = b")" + b"\x85" * 400_000
"""A tuple in a tuple in a tuple ...: hashing it overflows the stack of Python 3.11."""
IN_STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + DEEP + b"X\0\0\0\0K\x01tQ."
PARAMETERS = b"ctorch.nn.modules.container\nParameterList\n)\x81}X\x0b\0\0\0_parameters"
DEEP_KEYS = {
    "of a dictionary": b"}" + DEEP + b"K\x01s.",
    "of items": b"}(" + DEEP + b"K\x01u.",
    "of a call": b"ccollections\nOrderedDict\n(" + DEEP + b"K\x01\x86\x85tR.",
    "of a storage": IN_STORAGE,
    "of parameters": PARAMETERS + b"]" + DEEP + b"K\x01\x86asb.",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP_KEYS)
def test_keys_that_are_deep_tuples_are_refused(name, tmp_path):
    file = with_pickle(tmp_path / "tensors.bin", b"\x80\x02" + DEEP_KEYS[name])
    command = "import sys, pathlib; from prompt_tuning.checkpoints.formats import"
    command += " torch_archive as x; x.read_torch_archive(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", command, file], capture_output=True)
    assert done.returncode == 1 and b"InputError" in done.stderr


def test_numbers_of_big_endian_machines_are_refused(tmp_path):
    file = tmp_path / "tensors.bin"
    with zipfile.ZipFile(FIXTURE) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("order") else old.read(name))
    with pytest.raises(InputError, match="big-endian"):
        read_torch_archive(file)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name, tmp_path):
    content, message = DAMAGED[name]
    assert content != original()
    with pytest.raises(InputError, match=message):
        read_torch_archive(with_pickle(tmp_path / "tensors.bin", content))


def test_compressed_archives_are_refused(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"0" * 10_000)
    (tmp_path / "x.bin").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="compressed"):
        read_torch_archive(tmp_path / "x.bin")
