"""Damaged GGUF files end in one message, without a wait and without much memory."""

import struct
import tracemalloc

import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.gguf_files import read_gguf
from tests.support.gguf_files import (
    entry,
    field,
    float_tensors,
    header,
    padded,
    text,
    write_gguf,
)

HUGE = 2**40
LIST_OF_TEXTS = struct.pack("<IIQ", 9, 8, 3) + text("a") * 3
WEIGHT = "blk.0.attn_q.weight"


def test_fields_and_tensors_are_those_of_the_file(tmp_path):
    array = np.arange(8).reshape(2, 4)
    values = {"general.alignment": 32, "a.b": 1e-5, "texts": ["x", "\u00e9"], "t": True}
    file = write_gguf(tmp_path / "x.gguf", values, float_tensors({WEIGHT: array}))
    read = read_gguf(file)
    assert read.metadata.values == values
    assert read.tensors[WEIGHT].shape == (2, 4)
    assert read.tensors[WEIGHT].end == file.stat().st_size


DAMAGED = {
    "nothing": (b"", "is not a GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(40), "a ZIP archive"),
    "the magic alone": (b"GGUF", "ends at byte 4, within the version"),
    "an old version": (header(0, 0, 1), "has version 1"),
    "a big-endian file": (header(0, 0, 3 << 24), "is a big-endian file"),
    "many tensors": (header(HUGE, 0), "declares 1,099,511,627,776 tensors"),
    "many fields": (header(0, HUGE), "declares 1,099,511,627,776 fields"),
    "fewer fields": (header(0, 9) + field("a", 1), "ends at byte"),
    "a long name": (header(0, 1) + struct.pack("<Q", HUGE), "expected at most 1,000"),
    "a long text": (
        header(0, 1) + text("a") + struct.pack("<IQ", 8, 2**27),
        "within the field 'a'",
    ),
    "a long list": (
        header(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, HUGE),
        "a list of 1,099,511,627,776 values",
    ),
    "a list that is cut short": (
        header(0, 1) + text("a") + LIST_OF_TEXTS[:-1],
        "within the field 'a'",
    ),
    "a list of lists": (
        header(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1),
        "a value of type 9",
    ),
    "a value of an unknown type": (
        header(0, 1) + text("a") + struct.pack("<I", 99),
        "a value of type 99",
    ),
    "bytes as a name": (header(0, 1) + field(b"\xff", 1), "not UTF-8 text"),
    "bytes as a text": (header(0, 1) + field("a", b"\xff"), "'a' is not UTF-8 text"),
    "a field twice": (header(0, 2) + field("a", 1) * 2, "has the field 'a' twice"),
    "no axes": (header(1, 0) + entry(WEIGHT, (), "F32", 0), "has 0 axes"),
    "many axes": (header(1, 0) + entry(WEIGHT, (1,) * 9, "F32", 0), "has 9 axes"),
    "an empty axis": (header(1, 0) + entry(WEIGHT, (0, 2), "F32", 0), r"\(0, 2\)"),
    "a huge axis": (header(1, 0) + entry(WEIGHT, (HUGE, HUGE), "F32", 0), "elements"),
    "a type that is not read": (
        header(1, 0) + entry(WEIGHT, (2, 256), 16, 0),
        "'blk.0.attn_q.weight' has the type IQ2_XXS, expected one of F32",
    ),
    "an unknown type": (header(1, 0) + entry(WEIGHT, (2, 2), 77, 0), "number 77"),
    "a row that is no whole block": (
        header(1, 0) + entry(WEIGHT, (2, 33), "Q8_0", 0),
        "rows of 33 elements, expected a multiple of 32",
    ),
    "a tensor that is cut short": (
        padded(header(1, 0) + entry(WEIGHT, (2, 2), "F32", 0)) + bytes(15),
        "'blk.0.attn_q.weight' ends at byte 112, but the file has 111",
    ),
    "a tensor far beyond the end": (
        padded(header(1, 0) + entry(WEIGHT, (2, 2), "F32", 2**60)),
        "but the file has",
    ),
    "a tensor between two units": (
        padded(header(1, 0) + entry(WEIGHT, (2, 2), "F32", 8)) + bytes(64),
        "begins at byte 8 of the data, expected a multiple of 32",
    ),
    "a tensor twice": (
        padded(
            header(2, 0)
            + entry(WEIGHT, (2, 2), "F32", 0)
            + entry(WEIGHT, (2, 2), "F32", 32)
        )
        + bytes(64),
        "is in its table twice",
    ),
    "two tensors in one place": (
        padded(
            header(2, 0)
            + entry(WEIGHT, (2, 2), "F32", 0)
            + entry("b", (2, 2), "F32", 0)
        )
        + bytes(64),
        "begins at byte 0 of the data",
    ),
    "no alignment": (
        header(0, 1) + field("general.alignment", 0),
        "general.alignment = 0",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, damage):
    content, message = DAMAGED[damage]
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(InputError, match=message) as caught:
        read_gguf(file)
    assert str(file) in str(caught.value)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_every_truncation_is_refused(tmp_path):
    array = np.ones((2, 4))
    fields = {"general.architecture": "llama", "texts": ["a", "b"]}
    whole = write_gguf(tmp_path / "x.gguf", fields, float_tensors({WEIGHT: array}))
    content = whole.read_bytes()
    for size in range(len(content)):
        whole.write_bytes(content[:size])
        with pytest.raises(InputError):
            read_gguf(whole)
