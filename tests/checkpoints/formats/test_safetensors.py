"""Safetensors files that contradict the format."""

import itertools
import json
from typing import Any

import pytest
import safetensors

from prompt_tuning.checkpoints.formats import safetensors as our_reader
from prompt_tuning.checkpoints.formats.safetensors import open_safetensors, read_header
from prompt_tuning.core.errors import InputError


def entry(shape, *offsets, dtype: Any = "F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(file, header, data):
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


CONTRADICTIONS = {
    "overlap": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
    "gap": {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
    "gap at the start": {"a": entry([1], 8, 12)},
    "twice the same bytes": {"a": entry([3], 0, 12), "b": entry([3], 0, 12)},
    "fractional offsets": {"a": entry([3], 0.0, 12.0)},
    "missing offsets": {"a": {"dtype": "F32", "shape": [3]}},
    "one offset": {"a": entry([3], 12)},
    "negative offset": {"a": entry([3], -12, 0), "b": entry([3], 0, 12)},
    "negative shape": {"a": entry([-3, -1], 0, 12)},
    "huge shape": {"a": entry([2**40, 2**40], 0, 12)},
    "shape that wraps around": {"a": entry([2**62, 4], 0, 0), "b": entry([3], 0, 12)},
    "fractional shape": {"a": entry([3.0], 0, 12)},
    "true in a shape": {"a": entry([3, True], 0, 12)},
    "text in a shape": {"a": entry(["3"], 0, 12)},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 12]}},
    "unknown type": {"a": entry([3], 0, 12, dtype="F33")},
    "type that is a list": {"a": entry([3], 0, 12, dtype=["F32"])},
    "numbers as metadata": {"__metadata__": {"a": 1}, "a": entry([3], 0, 12)},
    "list as metadata": {"__metadata__": [1], "a": entry([3], 0, 12)},
    "list as entry": {"a": [3]},
    "a list": [entry([3], 0, 12)],
    "deep nesting": '{"a":' + "[" * 100_000,
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_values_that_the_library_refuses_are_refused(name, tmp_path):
    file = write(tmp_path / "a.safetensors", CONTRADICTIONS[name], bytes(12))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(file, "numpy")
    with pytest.raises(InputError, match=r"a\.safetensors"):
        read_header(file)


def test_any_order_of_entries_is_accepted(tmp_path):
    arrays = {"a": entry([1], 4, 8), "b": entry([2], 8, 16), "c": entry([1], 0, 4)}
    arrays["empty"] = entry([0, 7], 8, 8)
    for order in itertools.permutations(arrays):
        file = write(tmp_path / "a", {n: arrays[n] for n in order}, bytes(range(16)))
        with safetensors.safe_open(file, "numpy") as library:
            for name, tensor in read_header(file).items():
                assert tensor.read().tobytes() == library.get_tensor(name).tobytes()


def test_both_offsets_are_in_the_message(tmp_path):
    file = write(tmp_path / "a", CONTRADICTIONS["gap"], bytes(12))
    with pytest.raises(InputError, match=r"'b' .*begins at byte 8 .*expected 4.* 'a'"):
        read_header(file)


def test_a_name_that_occurs_twice_is_refused(tmp_path):
    text = ",".join(f'"a": {json.dumps(entry([3], 0, 12))}' for _ in range(2))
    file = write(tmp_path / "a", f"{{{text}}}", bytes(12))
    with pytest.raises(InputError, match="'a' more than once"):
        read_header(file)


def test_shapes_that_numpy_does_not_support_are_refused(tmp_path):
    file = write(tmp_path / "a", {"a": entry([1] * 65, 0, 4)}, bytes(4))
    with pytest.raises(InputError, match="at most 32 whole"):
        read_header(file)
    file = write(tmp_path / "a", {"a": entry([0, 2**62, 2**62], 0, 0)}, b"")
    with pytest.raises(InputError, match="shape"):
        read_header(file)


def test_a_header_over_the_formats_limit_is_refused_before_reading(tmp_path):
    file = tmp_path / "a.safetensors"
    size = our_reader.MAXIMUM_HEADER + 1
    with file.open("wb") as opened:
        opened.write(size.to_bytes(8, "little") + b"{")
        opened.truncate(2 * size)
    with pytest.raises(safetensors.SafetensorError, match="header too large"):
        safetensors.safe_open(file, "numpy")
    with pytest.raises(InputError, match=r"100,000,001 bytes.*at most 100,000,000"):
        read_header(file)


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "a\0", "a" * 300, 7, None, "", "..", "a/b", ["a"]]
)
def test_an_index_names_files_in_its_folder_only(name, tmp_path):
    write(tmp_path / "a", {"x": entry([3], 0, 12)}, bytes(12))
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    write(folder / "a" / "b", {"x": entry([3], 0, 12)}, bytes(12))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(InputError, match=r"index\.json (names|has weight_map)"):
        open_safetensors(folder)


def test_an_index_with_another_shape_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for content in ("[]", "null", "{}", '{"weight_map": []}', "[" * 100_000):
        index.write_text(content)
        with pytest.raises(InputError, match=r"index\.json"):
            open_safetensors(tmp_path)


def test_an_index_may_list_links_of_the_hubs_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs/1f", {"x": entry([3], 0, 12)}, bytes(12))
    folder = tmp_path / "snapshots/main"
    folder.mkdir(parents=True)
    (folder / "a.safetensors").symlink_to("../../blobs/1f")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert open_safetensors(folder)["x"].shape == (3,)


def test_names_and_numbers_beyond_the_limits_are_refused(tmp_path):
    file = write(tmp_path / "a", {"x" * 5_000_000: entry([3], 0, 12)}, bytes(12))
    with pytest.raises(InputError, match="name of more than 1000") as raised:
        read_header(file)
    assert len(str(raised.value)) < 1000
    count = our_reader.MAXIMUM_ARRAYS + 1
    file = write(tmp_path / "a", dict.fromkeys(map(str, range(count))), b"")
    with pytest.raises(InputError, match="100,001 arrays, expected at most 100,000"):
        read_header(file)
