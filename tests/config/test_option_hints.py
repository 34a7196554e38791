"""Messages name the option to type, and the binding that a config takes."""

import shlex

import pytest

from prompt_tuning.config.option_hints import as_option
from prompt_tuning.core.setting_hints import NUMBER


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
