"""Methods that Python configures are checked like those of a config."""

import pytest

import prompt_tuning as pt


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            pt.SoftPrompt(length="4"),  # pyright: ignore[reportArgumentType]
            "SoftPrompt.length is '4', a str; expected int",
        ),
        (pt.SoftPrompt(length=10**9), "SoftPrompt.length is 1,000,000,000, expected"),
        (pt.SoftPrompt(length=10**24), "expected an integer from"),
        (pt.LoRA(regexes=".*", rank=2), "LoRA.regexes is '.*', a str; expected a list"),
        (pt.LoRA(regexes=[".*"], alpha=float("nan")), "LoRA.alpha is nan, expected"),
        (
            pt.MeshShape(data=[1]),  # pyright: ignore[reportArgumentType]
            "MeshShape.data is [1], a list; expected int",
        ),
    ],
)
def test_an_unusable_value(method, words):
    with pytest.raises(pt.InputError) as refused:
        method.build()
    assert words in str(refused.value)
