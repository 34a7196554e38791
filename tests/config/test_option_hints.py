"""Messages name the option to type, or the argument of Python."""

import shlex
import subprocess
import sys

import pytest

from prompt_tuning.config.option_hints import as_option
from prompt_tuning.core.setting_hints import NUMBER, as_argument


@pytest.mark.parametrize(
    ("setting", "value", "option", "binding"),
    [
        ("DataSource.on_too_long", "skip", "--on_too_long skip", '"skip"'),
        ("Run.steps", 5, "--steps 5", "5"),
        ("Evaluation.exact_match", True, "--exact_match", "True"),
        ("Evaluation.labels", ["a b", "c"], "--labels 'a b' c", '["a b", "c"]'),
        ("Pretrained.tokenizer", "it's", "--tokenizer 'it'\"'\"'s'", '"it\'s"'),
    ],
)
def test_both_forms_are_named(setting, value, option, binding):
    hint = as_option(setting, value)
    assert hint.startswith(f"{option} (or ") and hint.endswith(")")
    typed = shlex.split(hint.removeprefix(f"{option} (or ")[:-1])
    assert typed == [f"--gin.{setting}={binding}"]


def test_a_setting_without_an_option_is_bound():
    assert as_option("DataSource.packing", True) == "--gin.DataSource.packing=True"
    assert as_option("Pretrained.eos_id", NUMBER) == "--gin.Pretrained.eos_id=NUMBER"


def test_an_option_that_sets_a_macro_is_named():
    assert as_option("SoftPrompt.length", 5).startswith("--prompt_length 5 (or ")


def test_an_argument_of_a_command_is_its_option():
    assert as_option("force", True) == "--force"
    assert as_option("prompt_id", NUMBER) == "--prompt_id NUMBER"


@pytest.mark.parametrize(
    ("setting", "value", "argument"),
    [
        ("DataSource.prompt_key", "KEY", "prompt_key='KEY'"),
        (
            "evaluation/DataSource.split",
            "KEY",
            "evaluation=DataSource(files=..., split='KEY')",
        ),
        ("Pretrained.eos_id", NUMBER, "load(..., eos_id=NUMBER)"),
        ("SoftPrompt.length", 5, "SoftPrompt(length=5)"),
        ("force", True, "force=True"),
    ],
)
def test_python_names_the_argument(setting, value, argument):
    assert as_argument(setting, value) == argument


def test_a_process_without_the_command_names_arguments():
    code = (
        "from prompt_tuning.core.setting_hints import how_to_set; "
        "print(how_to_set('DataSource.on_too_long', 'skip'))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "on_too_long='skip'", shown.stderr
