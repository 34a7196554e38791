import dataclasses
from collections.abc import Sequence
from typing import Literal

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 1
    rate: float = 0.5
    name: str | None = None
    choice: Literal["a", "b"] = "a"
    names: Sequence[str] | str = ()

    def __post_init__(self):
        check_fields(self)


def test_values_of_their_types_pass_and_an_integer_for_a_float():
    Settings(steps=3, rate=1, name="x", choice="b", names=["y"])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"steps": "3"}, "Settings.steps is '3', a str; expected int"),
        ({"steps": True}, "Settings.steps is True, a bool; expected int"),
        ({"steps": 3.0}, "Settings.steps is 3.0, a float; expected int"),
        ({"rate": "1"}, "Settings.rate is '1', a str; expected float or int"),
        ({"name": 3}, "Settings.name is 3, a int; expected str or None"),
        ({"choice": 1}, "Settings.choice is 1, a int; expected str"),
    ],
)
def test_a_value_of_another_type_is_refused(choices, message):
    with pytest.raises(InputError) as refused:
        Settings(**choices)
    assert str(refused.value).replace("NoneType", "None") == message
