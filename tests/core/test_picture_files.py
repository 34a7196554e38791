"""Pictures are replaced in a single step."""

import pytest
from matplotlib.figure import Figure

from prompt_tuning.core.errors import StorageError
from prompt_tuning.core.picture_files import write_picture


def test_a_picture_is_replaced_and_survives_a_full_disk(tmp_path, monkeypatch):
    file = tmp_path / "curves.png"
    file.write_bytes(b"older")
    write_picture(Figure(), file)
    picture = file.read_bytes()
    assert picture.startswith(b"\x89PNG")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(StorageError, match=r"curves\.png could not be written"):
        write_picture(Figure(figsize=(1, 1)), file)
    assert file.read_bytes() == picture
