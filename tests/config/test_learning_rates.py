"""The learning rate has the same name in every shipped config."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.operative_config import operative_config

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
    "adapters/tokens.gin": ["ADDED_TOKENS = ['<tool>']"],
    "adapters/class_head.gin": ["CLASS_LABELS = ['yes', 'no']"],
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
    bindings = ["MODEL = 'model'", *BINDINGS, *OWN.get(name, [])]
    read_run(["runs/first_prompt.gin", name], bindings)
    assert rates_in_use() == {"%LEARNING_RATE"}
    assert "LEARNING_RATE = 0.125" in operative_config()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("adapters/lora.gin", "0.001"),
        ("adapters/ia3.gin", "0.03"),
        ("prompts/prefix.gin", "0.02"),
        ("prompts/uniform.gin", "0.3"),
    ],
)
def test_a_method_has_its_own_default_rate(name, rate):
    read_run(["runs/first_prompt.gin", name], ["MODEL = 'model'", *BINDINGS[:3]])
    assert f"LEARNING_RATE = {rate}\n" in operative_config()


GROUPS = """
Run.adapters = [@LoRA()]
Run.groups = [@prompts/ParameterGroup(), @projections/ParameterGroup()]
prompts/ParameterGroup.regexes = ['.*/prompt/.*']
prompts/ParameterGroup.optimizer = @sgd/optax_transformation()
sgd/optax_transformation.name = 'sgd'
sgd/optax_transformation.learning_rate = @warmup_cosine_decay()
warmup_cosine_decay.peak = 0.5
warmup_cosine_decay.steps = 100
projections/ParameterGroup.regexes = ['.*/lora/.*']
projections/ParameterGroup.optimizer = @optax_chain()
optax_chain.parts = [@clip/optax_transformation(), @adamw()]
clip/optax_transformation.name = 'clip_by_global_norm'
clip/optax_transformation.arguments = {'max_norm': 1.0}
adamw.learning_rate = @warmup_rsqrt_decay()
warmup_rsqrt_decay.peak = 0.25
"""


def test_each_group_has_an_optimizer_and_a_schedule():
    files = ["runs/first_prompt.gin"]
    run = read_run(files, [*BINDINGS[:3], "MODEL = 'model'", *GROUPS.split("\n")[1:-1]])
    prompts, projections = (first_update(group.optimizer) for group in run.groups)
    np.testing.assert_allclose(prompts, -0.05, rtol=1e-5)  # a tenth of the peak
    np.testing.assert_allclose(projections, -0.025, rtol=1e-5)


def first_update(optimizer: optax.GradientTransformation) -> np.ndarray:
    """Returns the update of a parameter whose gradient is 1."""
    parameters = jnp.ones(2)
    update, _ = optimizer.update(parameters, optimizer.init(parameters), parameters)
    return np.asarray(update)
