"""The learning rate has the same name in every shipped config."""

import re
from pathlib import Path

import pytest

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.values_in_use import operative_config

CONFIGS = Path(__file__).parents[2] / "configs"
BINDINGS = [
    "TRAIN_FILES = 'train.jsonl'",
    "EVALUATION_FILES = 'held_out.jsonl'",
    "RUN_DIRECTORY = 'run'",
    "LEARNING_RATE = 0.125",
]
OWN = {
    "runs/t5_class_labels.gin": [
        "MODEL = 't5'",
        "TOKENIZER = 't5'",
        "CLASS_LABELS = ['a', 'b']",
    ],
    "runs/context_distillation.gin": ["CONTEXT = 'hi'"],
    "models/t5_1_1_small.gin": ["TOKENIZER = 't5'"],
}


def names(folder: str) -> list[str]:
    paths = sorted((CONFIGS / folder).glob("*.gin"))
    parts = ("adafactor", "skills", "training", "prefix_training")
    return [f"{folder}/{path.name}" for path in paths if path.stem not in parts]


def rates_in_use() -> set[str]:
    """Returns the values of the learning rates of the run that was read last."""
    rates = re.findall(r"(?:learning_rate|peak) = ([^@]\S*)", operative_config())
    return set(rates)


@pytest.mark.parametrize("name", names("runs"))
def test_a_run_has_a_learning_rate_by_name(name):
    files = ["models/t5_1_1_small.gin"] * (name == "runs/t5_class_labels.gin") + [name]
    model = [] if "skills" in name else ["MODEL = 'model'"]
    read_run(files, [*BINDINGS, *model, *OWN.get(name, [])])
    assert rates_in_use() == {"%LEARNING_RATE"}
    assert "LEARNING_RATE = 0.125" in operative_config()


@pytest.mark.parametrize("name", [*names("adapters"), "prompts/prefix.gin"])
def test_a_method_after_a_run_has_it_too(name):
    read_run(["runs/first_prompt.gin", name], ["MODEL = 'model'", *BINDINGS])
    assert rates_in_use() == {"%LEARNING_RATE"}
    assert "LEARNING_RATE = 0.125" in operative_config()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("adapters/lora.gin", "0.001"),
        ("adapters/ia3.gin", "0.01"),
        ("prompts/prefix.gin", "0.02"),
        ("prompts/uniform.gin", "0.3"),
    ],
)
def test_a_method_has_its_own_default_rate(name, rate):
    read_run(["runs/first_prompt.gin", name], ["MODEL = 'model'", *BINDINGS[:3]])
    assert f"LEARNING_RATE = {rate}\n" in operative_config()
