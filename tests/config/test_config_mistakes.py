"""Mistakes in a config are found before anything is read or compiled."""

import pytest

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError

FILES = ["runs/first_prompt.gin"]


@pytest.fixture
def bindings(tmp_path):
    data = tmp_path / "data.jsonl"
    data.touch()
    return [
        "MODEL = 'bundled:skills-decoder'",
        f"TRAIN_FILES = '{data}'",
        f"EVALUATION_FILES = ['{data}']",
        f"RUN_DIRECTORY = '{tmp_path / 'run'}'",
    ]


def refused(*bindings: str) -> str:
    with pytest.raises(InputError) as caught:
        read_run(FILES, bindings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("SoftPrompt.lenght = 3", "did you mean length"),
        ("SoftPromt.length = 3", "did you mean SoftPrompt"),
        ("STEP = 3", "did you mean STEPS"),
        ("Run.steps = '3'", "Run.steps is '3', a str; expected int"),
        ("STEPS = '3'", "Run.steps is '3', a str; expected int"),
        ("adafactor.learning_rate = 'x'", "is 'x', a str; expected a number"),
        ("adamw.learning_rate = 0.1", "has no effect: the run does not use adamw"),
        ("TRAIN_FILES = ['a', 3]", "DataSource.files is ['a', 3], a list"),
    ],
)
def test_mistakes(binding, message, bindings):
    assert message in refused(*bindings, binding)


def test_unset_macros_are_named():
    assert "it needs EVALUATION_FILES, MODEL, RUN_DIRECTORY" in refused()
