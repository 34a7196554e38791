"""Names of files that other files contain."""

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_name, path_within


@pytest.mark.parametrize("name", ["a", "a.npy", "a/b", "a/../b"[:1], "..a", "ä" * 127])
def test_names_within_a_folder_are_returned(name, tmp_path):
    assert check_name(name, "s") == name
    assert path_within(tmp_path, name, "s") == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        "../x.npy",
        "../../x.npy",
        "a/../../x",
        "a/../b",
        "/etc/passwd",
        "//etc/passwd",
        "",
        ".",
        "a\0b",
        "a" * 300,
        "ä" * 128,
        "a/" * 3000,
        "\udcff",
        None,
        7,
        ["a"],
        {"a": 1},
    ],
)
def test_other_names_are_refused(name, tmp_path):
    with pytest.raises(InputError, match="state of x names the file"):
        path_within(tmp_path, name, "state of x")


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "inside").write_text("plain")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "parent").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "fine").symlink_to("inside")
    for name in ("link", "parent/secret"):
        with pytest.raises(InputError, match="link out of"):
            path_within(folder, name, "s")
    assert path_within(folder, "fine", "s").read_text() == "plain"
    # The folder itself may be a link.
    (tmp_path / "alias").symlink_to(folder)
    assert path_within(tmp_path / "alias", "inside", "s").read_text() == "plain"
