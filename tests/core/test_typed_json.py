"""Reading JSON with limits and types."""

import json
import os

import pytest

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import (
    MAXIMUM_DEPTH,
    JsonObject,
    parse_json,
    read_json,
    read_object,
)

OBJECT = JsonObject("a.json", {"n": 3, "x": 0.5, "t": "abc", "b": True, "none": None})


def test_fields_are_returned_by_type():
    assert OBJECT.integer("n") == 3
    assert (OBJECT.number("n"), OBJECT.number("x")) == (3.0, 0.5)
    assert OBJECT.text("t") == "abc"
    assert OBJECT.flag("b") is True
    assert JsonObject("a", {"o": {"n": 1}}).nested("o").integer("n") == 1


def test_absent_fields_and_null_have_the_default():
    assert "none" not in OBJECT
    assert OBJECT.integer("none", 7) == 7
    assert OBJECT.number("absent", None) is None
    with pytest.raises(InputError, match=r"a\.json has no 'absent'"):
        OBJECT.text("absent")


@pytest.mark.parametrize(
    "value", ["3", [3], 3.5, 3.0, True, 10**300, -1, {"n": 3}, 2**31]
)
def test_integers_of_another_type_or_range_are_refused(value):
    with pytest.raises(
        InputError, match=r"a\.json has n = .*, expected a whole number"
    ):
        JsonObject("a.json", {"n": value}).integer("n")


@pytest.mark.parametrize(
    "value", ["3", [3], True, 10**400, float("nan"), float("inf"), -1.0]
)
def test_numbers_that_are_not_finite_or_out_of_range_are_refused(value):
    with pytest.raises(InputError, match="expected a finite number from 0"):
        JsonObject("a.json", {"x": value}).number("x", minimum=0)


def test_a_missing_field_whose_default_does_not_fit_is_reported_as_missing():
    with pytest.raises(InputError, match=r"^a file has no layers, expected 2 kinds$"):
        JsonObject("a file", {}).refuse("layers", "2 kinds")


def test_other_types_are_refused_with_both_types():
    with pytest.raises(InputError, match=r"has t = 'abc', expected true or false"):
        OBJECT.flag("t")
    with pytest.raises(InputError, match=r"has n = 3, expected an object"):
        OBJECT.nested("n")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b'{"a": }', b"1" * 5000, b"\0"]
)
def test_anything_other_than_json_is_refused(content):
    with pytest.raises(InputError, match=r"a\.json is not (valid JSON|UTF-8)"):
        parse_json(content, "a.json")


def test_a_byte_order_mark_is_skipped():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "a") == {"a": 1}


@pytest.mark.parametrize("depth", [MAXIMUM_DEPTH + 1, 900, 100_000])
def test_deep_nesting_is_refused(depth):
    with pytest.raises(InputError, match="nests its JSON more than 100 levels deep"):
        parse_json("[" * depth + "]" * depth, "a.json")
    with pytest.raises(InputError, match="nests its JSON more than 100 levels deep"):
        parse_json('{"a":' * depth + "1" + "}" * depth, "a.json")


def test_many_shallow_brackets_are_accepted():
    values = [[] for _ in range(1000)]
    assert parse_json(json.dumps(values), "a") == values
    deepest = "[" * MAXIMUM_DEPTH + "]" * MAXIMUM_DEPTH
    assert json.dumps(parse_json(deepest, "a")) == deepest


def test_a_file_beyond_its_limit_is_refused_with_both_sizes(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("[1, 2, 3]")
    assert read_json(file, maximum_bytes=9) == [1, 2, 3]
    with pytest.raises(InputError, match="has 9 bytes, expected at most 8"):
        read_json(file, maximum_bytes=8)


def test_a_missing_file_a_folder_and_a_list_are_refused(tmp_path):
    with pytest.raises(InputError, match="is missing"):
        read_object(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"cannot be read: .*directory"):
        read_object(tmp_path)
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(InputError, match="contains a list, expected a JSON object"):
        read_object(tmp_path / "a.json")


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(InputError, match="is a pipe or a device, expected a file"):
        read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        read_json(tmp_path / ("a" * 300))


def test_foreign_values_are_shortened():
    assert shown("abc") == "'abc'"
    assert len(shown("a" * 5_000_000)) < 250
    assert shown([1] * 1000).endswith("(3,000 characters)")
    assert shown(10**5000) == "int that is too long to print"
    assert "\n" not in shown("a\nb")


def test_a_list_of_integers_is_checked():
    values = JsonObject("a.json", {"good": [1, 2], "bad": [1, 2.0], "text": "12"})
    assert values.integers("good") == [1, 2]
    with pytest.raises(InputError, match=r"bad = \[1, 2.0\], expected a list of whole"):
        values.integers("bad")
    with pytest.raises(InputError, match="expected a list"):
        values.integers("text")
    with pytest.raises(InputError, match="from 0 to 1"):
        values.integers("good", maximum=1)


def test_repeated_names_are_refused_if_names_must_be_distinct():
    assert parse_json('{"a": 1, "a": 2}', "a.json") == {"a": 2}
    with pytest.raises(InputError, match=r"a\.json is not valid .*'a' more than once"):
        parse_json('[{"b": 1, "a": 1, "a": 2}]', "a.json", distinct_names=True)


def test_a_message_does_not_repeat_a_long_name():
    content = JsonObject("a.json", {"a" * 70_000: "x"})
    with pytest.raises(InputError, match="a finite number") as raised:
        content.number("a" * 70_000)
    assert len(str(raised.value)) < 400
