"""Arrays whose headers contradict the content of the file."""

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.tools.token_type_files import read_array


def test_an_array_larger_than_its_file_is_refused(tmp_path):
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
    with (tmp_path / "lengths.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InputError, match="declares 8,000,000,000,128"):
        read_array(tmp_path / "lengths.npy", ("rows",))


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-3,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "-" * 9000 + "3,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i8',",
        "(" * 5000,
    ],
)
def test_headers_of_arrays_are_checked(tmp_path, text):
    path = tmp_path / "lengths.npy"
    content = text.encode() + b"\n"
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content
    )
    with pytest.raises(InputError, match=r"lengths\.npy"):
        read_array(path, ("rows",))


def test_arrays_are_read(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(3))
    assert read_array(tmp_path / "lengths.npy", ("rows",)).tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="is not a file"):
        read_array(tmp_path, ("rows",))
