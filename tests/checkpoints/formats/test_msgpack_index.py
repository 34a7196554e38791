from pathlib import Path

import msgpack
import pytest

from prompt_tuning.checkpoints.formats import msgpack_index
from prompt_tuning.checkpoints.formats.msgpack_index import PackedFile, Span


def packed(path: Path, value: object) -> PackedFile:
    path.write_bytes(msgpack.packb(value))  # type: ignore[arg-type]
    return PackedFile(path)


def test_values_of_every_kind_equal_those_that_msgpack_packs(tmp_path):
    sizes = (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536)
    numbers = [sign * (2**bits + by) for bits in (5, 7, 8, 15, 16, 31, 32, 62)
               for by in (-1, 0) for sign in (1, -1)]  # fmt: skip
    value = {
        "numbers": [*numbers, 2**64 - 1, 0.5, -1e300, None, True, False],
        "texts": ["é" * (size // 2) + "x" * (size % 2) for size in sizes],
        "lists": [list(range(size % 7)) for size in sizes] + [[1] * 300],
        "maps": [{str(i): i for i in range(size)} for size in (0, 15, 16, 300)],
    }
    assert packed(tmp_path / "file", value).value() == value


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x00\x00\x02\x01\xa1b",
        b"\xdf\x00\x00\x00\x02\xa1a\x01\xa1b\x02",
        b"\x92\xdd\x00\x00\x00\x00\xdf\x00\x00\x00\x00",
    ],
)
def test_lengths_of_lists_and_maps_in_32_bits_are_read_as_msgpack_does(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    assert PackedFile(tmp_path / "file").value() == msgpack.unpackb(data)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 8, 16, 17, 255, 256, 65_535, 65_536])
def test_bytes_and_extensions_are_returned_as_their_offsets(size, tmp_path):
    data = bytes(i % 251 for i in range(size))
    file = packed(tmp_path / "file", [data, msgpack.ExtType(5, data)])
    plain, extension = file.value()
    assert (plain.code, extension.code) == (None, 5)
    for span in (plain, extension):
        assert isinstance(span, Span)
        assert file.data[span.start : span.start + span.size] == data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty"),
        (b"\xc1", "byte 0 is 0xc1"),
        (b"\x92\x01", "cut short: byte 2"),
        (b"\xdb\x00\x00", "cut short: byte 0"),
        (b"\xa3ab", "cut short: byte 0"),
        (b"\xc4\x03ab", "cut short: 1 more"),
        (b"\xc9\x00", "cut short"),
        (b"\x92\xc4\x01a\xc7", "cut short"),
        (b"\x01\x02", "1 bytes follow"),
        (b"\x81\x90\x01", "tree of names"),
        (b"\x91" * 100_000, "more than 100 levels"),
        (b"\xa1\xff", "decode"),
    ],
)
def test_invalid_msgpack_is_refused(data, expected, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=expected):
        PackedFile(file).value()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xdd\xff\xff\xff\xff" + b"\xc0" * 3000, "more than 2,000 values"),
        (b"\xdf\xff\xff\xff\xff", "cut short"),
        (b"\xdb\xff\xff\xff\xff" + b"a" * 2_000_000, "a text of over 1,048,576"),
        (b"\xc9\xff\xff\xff\xff\x01", "4,294,967,295 more bytes"),
        (b"\xc6\xff\xff\xff\xff", "4,294,967,295 more bytes"),
        (b"\x81\xa1a" * 100_000, "more than 100 levels"),
    ],
)
def test_declared_sizes_beyond_the_limits_are_refused(
    data, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(msgpack_index, "MAXIMUM_VALUES", 2000)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=expected):
        PackedFile(tmp_path / "file").value()
