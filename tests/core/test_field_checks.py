import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields, check_value


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 1
    rate: float = 0.5
    name: str | None = None
    choice: Literal["a", "b"] = "a"
    names: Sequence[str] | str = ()
    best: tuple[str, str] | None = None
    pairs: Sequence[tuple[str, str | None]] = ()
    columns: Mapping[str, str] | None = None
    make: Callable[[int], int] | None = None
    schedule: float | Callable[[int], float] = 1.0

    def __post_init__(self):
        check_fields(self)


def test_values_of_the_right_type_pass_and_integers_pass_as_floats():
    Settings(steps=3, rate=1, name="x", choice="b", names=["y"])
    Settings(best=("a", "b"), pairs=[("a", None)], columns={"a": "b"}, make=abs)
    Settings(names="x", schedule=abs)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"steps": "3"}, "Settings.steps is '3', a str; expected int"),
        ({"steps": True}, "Settings.steps is True, a bool; expected int"),
        ({"steps": 3.0}, "Settings.steps is 3.0, a float; expected int"),
        ({"rate": "1"}, "Settings.rate is '1', a str; expected float or int"),
        ({"name": 3}, "Settings.name is 3, an int; expected str or None"),
        ({"choice": 1}, "Settings.choice is 1, an int; expected str"),
        (
            {"names": 3},
            "Settings.names is 3, an int; expected a list of strings or str",
        ),
        (
            {"names": [1]},
            "Settings.names is [1], a list; expected a list of strings or str",
        ),
        (
            {"best": ["a"]},
            "Settings.best is ['a'], a list; expected (str, str) or None",
        ),
        (
            {"pairs": {"a": "b"}},
            "Settings.pairs is {'a': 'b'}, a dict; "
            "expected a list of (str, str or None)",
        ),
        (
            {"columns": {"a": 1}},
            "Settings.columns is {'a': 1}, a dict; expected a dict of str to str or "
            "None",
        ),
        (
            {"make": "abs"},
            "Settings.make is 'abs', a str; expected a factory, such as @name or None",
        ),
        (
            {"steps": 2**31},
            "Settings.steps is 2147483648, expected an integer from -2,147,483,647 to "
            "2,147,483,647",
        ),
        (
            {"rate": float("nan")},
            "Settings.rate is nan, expected a finite number",
        ),
        (
            {"steps": -(10**5000)},
            "Settings.steps is int that is too long to print, expected an integer from "
            "-2,147,483,647 to 2,147,483,647",
        ),
    ],
)
def test_a_value_with_another_type_is_refused(choices, message):
    with pytest.raises(InputError) as refused:
        Settings(**choices)
    assert str(refused.value).replace("NoneType", "None") == message


def test_only_the_texts_of_a_literal_are_accepted():
    hint = Literal["error", "skip"] | None
    check_value("Data.mode", "skip", hint)
    check_value("Data.mode", None, hint)
    with pytest.raises(InputError, match="mode is 'Skip', expected one of 'error', 's"):
        check_value("Data.mode", "Skip", hint)
    check_value("Data.mode", "Skip", Literal["error"] | str)
