"""Every number of a setting states its range, and values outside of it are refused."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.config.deferred_factories import Configurable, parameter_names
from prompt_tuning.config.factories import FACTORIES, import_factories
from prompt_tuning.config.parameter_checks import check_parameter, parameter_hints
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import (
    Preparation,
    RecordFormat,
    Share,
    Splits,
    TextFormat,
    TokenizerChoice,
)
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.processes.process_launch import Launch
from prompt_tuning.texts.text_settings import TextSettings
from prompt_tuning.texts.text_study import TextStudy
from tests.support.outside_values import has_unranged, outside
from tests.support.refusals import REFUSALS

PACKAGE = Path(pt.__file__).parent
NEEDED: dict[type, dict[str, Any]] = {
    Sampling: {"temperature": 0.7},
    Launch: {"coordinator": "host:1", "processes": 2, "process": 0},
    Preparation: {"inputs": ("x",), "output": "y", "tokenizer": TokenizerChoice("z")},
}
"""Fields that a class of settings without a factory needs in order to be valid."""
SETTINGS = (
    *(Sampling, BeamSearch, TextSettings, TextStudy, Launch),
    *(Preparation, RecordFormat, TextFormat, Splits, Share),
)
PAIRS = [("a", "b")]
READ_FROM_FILES = {"ModelConfig", "RotaryScaling", "RotaryDivisors", "QueryScaling"}
"""Classes whose fields come from `config.json`, which `core.model_sizes` checks."""


def factory_parameters() -> list[tuple[str, str]]:
    return [(name, each) for name in FACTORIES for each in parameter_names(name)]


def fields() -> list[tuple[type, str]]:
    return [
        (settings, name)
        for settings in SETTINGS
        for name in inspect.signature(settings).parameters
    ]


def make(settings: type, **values: Any) -> None:
    made = settings(**NEEDED.get(settings, {}) | values)
    if settings in (RecordFormat, TextFormat, Splits):
        name = {RecordFormat: "record", TextFormat: "text", Splits: "splits"}[settings]
        made = Preparation(**NEEDED[Preparation], **{name: made})
    if isinstance(made, Preparation):
        made.check()


@pytest.mark.parametrize(("name", "parameter"), factory_parameters())
def test_a_parameter_of_a_config(name, parameter):
    factory = import_factories()[name]
    hint = parameter_hints(factory).get(parameter, Any)
    assert not has_unranged(hint), f"state the range of {name}.{parameter} in its type"
    for value in outside(hint):
        with pytest.raises(InputError, match=parameter):
            check_parameter(factory, parameter, value)
        with pytest.raises(InputError, match=parameter):
            Configurable(name)(**{parameter: value}).build()


@pytest.mark.parametrize(("settings", "name"), fields())
def test_a_field_of_other_settings(settings, name):
    hint = get_type_hints(settings, include_extras=True)[name]
    assert not has_unranged(hint), f"state the range of {settings}.{name} in its type"
    make(settings)
    for value in outside(hint):
        with pytest.raises(REFUSALS, match=name):
            make(settings, **{name: value})


def test_no_class_that_checks_its_fields_is_left_out():
    checked = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and "check_fields(self" in ast.unparse(node)
    }
    bases = {"AdapterSpec"}
    named = {settings.__name__ for settings in SETTINGS}
    assert checked <= named | FACTORIES.keys() | READ_FROM_FILES | bases


@pytest.mark.parametrize(
    "value",
    [-1, 0, -0.0, np.float32(-1), np.int64(0), jnp.float32(0), np.float64("nan")],
)
def test_a_learning_rate_that_learns_nothing(value):
    for settings in (
        pt.adamw(learning_rate=value),
        pt.adafactor(learning_rate=value),
        pt.optax_transformation("sgd", learning_rate=value),
    ):
        with pytest.raises(pt.InputError, match="expected a number above 0"):
            settings.build()


def test_a_learning_rate_among_the_arguments_of_optax():
    settings = pt.optax_transformation("sgd", {"learning_rate": -0.5})
    with pytest.raises(pt.InputError, match=r"rate of optax\.sgd is -0\.5, expected"):
        settings.build()


@pytest.mark.parametrize("alpha", [0, -16.0])
def test_lora_is_trained_with_a_factor_above_zero_but_read_with_any(alpha):
    lora = pt.LoRA(rank=2, alpha=alpha).build()
    assert lora.alpha == alpha
    group = pt.ParameterGroup([".*"], pt.adamw()).build()
    model = pt.Pretrained(checkpoint="bundled:skills-decoder").build()
    with pytest.raises(pt.InputError, match=r"LoRA\.alpha is .*, expected a number ab"):
        pt.Run(model=model, adapters=[lora], groups=[group])


def test_a_refused_value_from_python_writes_nothing(tmp_path):
    directory = tmp_path / "run"
    wrong: list[dict[str, Any]] = [
        {"learning_rate": -1},
        {"steps": 0},
        {"batch_size": 0},
    ]
    for values in wrong:
        given = {"directory": directory, "progress": False, **values}
        with pytest.raises(pt.InputError, match=min(values)):
            pt.tune("bundled:skills-decoder", pt.SoftPrompt(length=2), PAIRS, **given)
    assert not directory.exists()


ARGUMENTS = {
    "generate": {"new_tokens": 0, "temperature": -1, "top_k": 0, "seed": -1},
    "predict": {"batch_size": 0},
    "batches": {"batch_size": 0, "steps": 0, "seed": -1},
    "evaluate": {"new_tokens": 0, "resamples": 0, "batch_size": 0},
}


@pytest.mark.parametrize("method", ARGUMENTS)
def test_an_argument_of_a_model(method):
    model = pt.load("bundled:skills-decoder")
    given = {"generate": [["a"]], "predict": [["a"]]}
    for name, value in ARGUMENTS[method].items():
        with pytest.raises(pt.InputError, match=f"{name} is {value}, expected"):
            made = getattr(model, method)(*given.get(method, [PAIRS]), **{name: value})
            list(made)


def trained(kind: Callable[[int], Any]) -> list[np.ndarray]:
    """Returns what a step trains with numbers of a type."""
    numbers = {"normalizer": 2, "z_loss": 1, "label_smoothing": 0, "soft_cap": 30}
    tuned = pt.tune(
        pt.load("bundled:skills-decoder", dropout_rate=kind(0)),
        pt.SoftPrompt(length=2),
        PAIRS,
        objective=pt.TokenObjective(**{k: kind(x) for k, x in numbers.items()}),
        optimizer=pt.adamw(kind(1), b1=kind(0), eps=kind(1)),
        prompt_loss_weight=kind(1),
        steps=1,
        progress=False,
    )
    return [np.asarray(leaf) for leaf in tuned.trained.values()]


def test_whole_numbers_are_numbers():
    np.testing.assert_array_equal(trained(int), trained(float))
