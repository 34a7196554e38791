"""Options without a config: the same run as Python's and as the shipped config's."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import prompt_tuning as pt
from prompt_tuning.config.configured import factory_named, factory_signature
from prompt_tuning.config.flat_choices import check_training, default_directory
from prompt_tuning.config.flat_runs import flat_request, read_flat_run
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.methods import METHODS, list_rates
from prompt_tuning.config.parameter_checks import parameter_hints
from prompt_tuning.config.python_runs import recipe_of, tune_request
from prompt_tuning.config.shipped_configs import list_configs
from prompt_tuning.config.values_in_use import complete_config
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.flat_option import METHOD
from prompt_tuning.core.flat_options import LOSSES, OPTIONS, TABLE

MODEL = "bundled:skills-decoder"
GIVEN = {"model": MODEL, "train": ["a.jsonl"], "eval": ["b.jsonl"], "out": "run"}
NEEDED = {
    "labels": ["x", "y"],
    "prompt_text": "hi",
    "prompt_file": "p.npy",
    "tasks": 3,
    "shared_features": 4,
    "task_features": 12,
}
MACROS = {"labels": "CLASS_LABELS", "context": "CONTEXT"}


def flat_config(**choices) -> str:
    read_flat_run(GIVEN | choices)
    return complete_config()


def python_config(method, **settings) -> str:
    """Returns the config of `pt.tune` with some arguments."""
    named: dict[str, Any] = {"learning_rate": None, "optimizer": None}
    named |= {"objective": None, "evaluation": "b.jsonl", "settings": {"steps": 1000}}
    request = tune_request(
        pt.Pretrained(checkpoint=MODEL),
        [method],
        "a.jsonl",
        directory=Path("run"),
        **(named | settings),
    )
    request.read()
    return complete_config()


def test_options_and_python_configure_the_same_bytes():
    flat = flat_config(
        method="lora",
        rank=4,
        learning_rate=0.002,
        schedule="linear",
        steps=50,
        batch_size=16,
        labels=["positive", "negative"],
        loss="class_cross_entropy",
        seed=3,
        on_too_long="skip",
        max_examples=9,
    )
    labels = ["positive", "negative"]
    python = python_config(
        pt.LoRA(rank=4),
        learning_rate=pt.warmup_linear_decay(peak=0.002, steps=50),
        objective=pt.ClassObjective(
            labels=labels, loss="cross_entropy", length_normalize=True
        ),
        evaluation=pt.Evaluation(data="b.jsonl", labels=labels, length_normalize=True),
        settings={
            "steps": 50,
            "batch_size": 16,
            "seed": 3,
            "on_too_long": "skip",
            "maximum_examples": 9,
        },
    )
    assert flat == python
    prompt = pt.SoftPrompt(length=20, initializer=pt.from_sampled_vocabulary())
    assert flat_config(steps=1000) == python_config(prompt)


PARTS_OF_A_RUN = (
    *("Run", "DataSource", "Evaluation", "Pretrained", "Prompting", "ParameterGroup"),
    *("Rematerialization", "adafactor", "adamw", "warmup_linear_decay"),
)
BASE = ["models/checkpoint.gin", "data/pairs.gin", "runs/adafactor.gin"]


def values_of_method(config: str) -> dict[str, str]:
    """Returns the values of the prompt, its initializer or the adapter."""
    config = re.sub(r"\\?\n    +", " ", config)
    macros = dict(re.findall(r"^(\w+) = (.*)$", config, re.MULTILINE))
    lines = re.findall(r"^(?:\w+/)*([\w.]+) = (.*)$", config, re.MULTILINE)
    values = {name: macros.get(value.removeprefix("%"), value) for name, value in lines}
    return {
        name: re.sub(r"@\w+/", "@", value)
        for name, value in values.items()
        if "." in name and name.partition(".")[0] not in PARTS_OF_A_RUN
    }


def without_defaults(values: dict[str, str]) -> dict[str, str]:
    """Leaves out values that are their parameters' defaults."""
    chosen = {}
    for name, value in values.items():
        factory, _, parameter = name.partition(".")
        parameters = factory_signature(factory_named(factory)).parameters
        default = parameters[parameter].default
        if repr(default).strip("()[],") != value.strip("()[],"):
            chosen[name] = value
    return chosen


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_shipped_config(name):
    method = METHODS[name]
    options = {given.option for given in method.options()}
    choices = {option: NEEDED[option] for option in options & NEEDED.keys()}
    flat = values_of_method(flat_config(method=name, **choices))
    macros = {MACROS.get(option, option.upper()): x for option, x in choices.items()}
    macros |= {"MODEL": MODEL, "TRAIN_FILES": "a.jsonl", "EVALUATION_FILES": "b.jsonl"}
    macros |= {"RUN_DIRECTORY": "run"}
    macros |= {"PROMPT_LENGTH": 20} if "prompt_length" in options else {}
    bindings = [f"{macro} = {value!r}" for macro, value in macros.items()]
    run = read_run([*BASE, method.config], bindings)
    shipped = values_of_method(complete_config())
    assert without_defaults(flat) == without_defaults(shipped)
    assert bool(run.prompt) == bool(method.settings and not run.adapters)


def test_every_config_of_a_method_is_a_method():
    parts = {"soft", "prefix_training", "training", "inference_only"}
    configs = {
        Path(name).stem
        for name in list_configs()
        if name.startswith(("prompts/", "adapters/"))
    }
    assert METHODS.keys() - {"soft"} == configs - parts


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "cross_entropy"])
def test_a_loss_is_its_shipped_config(loss):
    needed = {"labels": ["x", "y"]} if loss.startswith("class") else {}
    needed |= {"context": "hi"} if loss == "context_distillation" else {}
    flat = read_flat_run(GIVEN | {"loss": loss} | needed)
    macros = {MACROS[name]: value for name, value in needed.items()}
    macros |= {"MODEL": MODEL, "TRAIN_FILES": "a.jsonl", "EVALUATION_FILES": "b.jsonl"}
    shipped = read_run(
        ["runs/first_prompt.gin", f"losses/{loss}.gin"],
        [f"{name} = {value!r}" for name, value in macros.items()]
        + ["RUN_DIRECTORY = 'run'"],
    )
    assert flat.objective == shipped.objective
    assert flat.best_by == shipped.best_by
    assert flat.data is not None and shipped.data is not None
    assert flat.data.advantages_key == shipped.data.advantages_key
    assert flat.evaluation is not None and shipped.evaluation is not None
    assert flat.evaluation.labels == shipped.evaluation.labels
    assert flat.evaluation.length_normalize == shipped.evaluation.length_normalize


def test_the_defaults_in_help_are_those_of_the_settings():
    for option in TABLE:
        owner, _, parameter = option.setting.rpartition(".")
        kinds = option.kind, *get_args(option.kind)
        if owner and type(option.default) in kinds and option.default != "all":
            factory = factory_named(owner.rpartition("/")[2])
            default = factory_signature(factory).parameters[parameter].default
            derived = inspect.Parameter.empty, None
            if default not in derived and parameter != "directory":
                assert option.default == default, option.name
    given = [given for method in METHODS.values() for given in method.options()]
    lengths = {item.default for item in given if item.option == "prompt_length"}
    assert lengths == {OPTIONS["prompt_length"].default}


def test_the_ranges_are_those_of_the_settings():
    for option in TABLE:
        owner, _, parameter = option.setting.rpartition(".")
        if owner and option.is_number:
            hints = parameter_hints(factory_named(owner.rpartition("/")[2]))
            assert hints[parameter] in (option.kind, option.kind | None), option.name


def test_the_learning_rates_in_help_are_those_of_the_methods():
    labels = {"lora": "lora", "ia3": "ia3", "prefix": "prefixes", "soft": "prompts"}
    for name, label in labels.items():
        settings = METHODS[name].settings
        assert settings is not None
        recipe = recipe_of(settings)
        rate = recipe.parameters["learning_rate"]
        assert f"{rate:g} with {recipe.name} for {label}" in list_rates()


def test_bindings_override_options_and_reach_parts_that_options_leave_out():
    bindings = ["Prompting.placement = 'suffix'", "Run.seed = 5", "LoRA.alpha = 2.0"]
    with pytest.raises(InputError, match=r"LoRA\.alpha has no effect"):
        read_flat_run(GIVEN, bindings)
    run = read_flat_run(GIVEN | {"seed": 1}, bindings[:2])
    assert run.seed == 5 and run.prompting is not None
    assert run.prompting.placement == "suffix"


def test_options_of_token_types_apply_to_training_and_held_out_data():
    run = read_flat_run(GIVEN)
    assert run.source.use_token_type_ids is None
    choices = {"use_token_type_ids": True, "prompt_loss_weight": 0.1}
    run = read_flat_run(GIVEN | choices | {"on_nothing_learned": "skip"})
    assert run.evaluation is not None
    for data in (run.source, run.evaluation.data):
        assert data.use_token_type_ids and data.prompt_loss_weight == 0.1
        assert data.on_nothing_learned == "skip"


def test_a_template_places_the_vectors():
    run = read_flat_run(GIVEN | {"template": "{soft:20} Say {prompt}"})
    assert run.prompting is not None and run.prompting.placement == "template"
    assert run.data is not None and run.data.template == "{soft:20} Say {prompt}"
    assert "from_template.template" in complete_config()


def test_options_override_macros_or_parameters_of_a_config():
    bindings = ["MODEL = 'm'", "RUN_DIRECTORY = 'run'"]
    choices = {"train": ["a.jsonl"], "eval": ["b.jsonl"], "learning_rate": 0.5}
    choices |= {"steps": 70, "on_too_long": "skip", "eval_every": 3}
    run = read_run(["runs/first_prompt.gin"], bindings, choices=choices)
    assert (run.steps, run.evaluate_every) == (70, 3)
    assert run.data is not None and run.data.on_too_long == "skip"
    assert list(run.data.files) == ["a.jsonl"]
    assert "LEARNING_RATE = 0.5" in complete_config()


@pytest.mark.parametrize(
    ("choice", "value", "typed"),
    [
        ("method", "lora", "--gin_file adapters/lora.gin"),
        ("loss", "class_hinge", "--gin_file losses/class_hinge.gin"),
        ("tasks", 3, "sets the macro TASKS, which the config has not"),
    ],
)
def test_an_option_that_a_config_replaces_is_refused(choice, value, typed):
    with pytest.raises(InputError, match=re.escape(typed)):
        read_run(["runs/first_prompt.gin"], ["MODEL = 'm'"], choices={choice: value})


@pytest.mark.parametrize(
    ("config", "choice", "value", "typed"),
    [
        ("adafactor.eps = 1e-9", "learning_rate", 0.5, "adafactor.learning_rate=0.5"),
        ("adamw.eps = 1e-9", "learning_rate", 0.5, "adamw.learning_rate=0.5"),
        ("adamw.b1 = 0", "schedule", "linear", "adamw.learning_rate='@warmup_lin"),
        ("DeepPrompt.length = 3", "prompt_length", 4, "DeepPrompt.length=4"),
    ],
)
def test_the_setting_to_type_is_one_of_the_config(
    config, choice, value, typed, tmp_path
):
    (tmp_path / "run.gin").write_text(config + "\n")
    with pytest.raises(InputError, match=re.escape(f"such as --gin.{typed}")):
        read_run([str(tmp_path / "run.gin")], [], choices={choice: value})


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, "nothing to train was given"),
        ({"model": "m"}, "--train is missing"),
        ({"train": ["a"]}, "--model is missing"),
        ({"method": "lroa"}, "--method lroa is unknown; did you mean lora"),
        ({"method": "ia3", "rank": 3}, "--rank has no effect on --method ia3"),
        ({"method": "text"}, "--method text needs --prompt_text TEXT"),
        ({"loss": "class_hinge"}, "needs --labels"),
        ({"context": "hi"}, "--context has no effect"),
    ],
)
def test_options_that_cannot_be_used_are_refused(choices, expected):
    known = ("model", "train")
    whole = choices if not choices or choices.keys() & set(known) else GIVEN | choices
    with pytest.raises(InputError, match=re.escape(expected)):
        check_training(whole)


def test_options_of_evaluation_need_held_out_data():
    choices = {"model": MODEL, "train": ["a.jsonl"]}
    for name, value in (("eval_every", 3), ("exact_match", True), ("labels", ["a"])):
        with pytest.raises(InputError, match=f"--{name} has no effect"):
            check_training(choices | {name: value})


@pytest.mark.parametrize(
    ("model", "directory"),
    [
        (MODEL, "runs/skills-decoder-soft"),
        ("models/Llama 3.2/", "runs/Llama-3.2-soft"),
        ("..", "runs/model-soft"),
    ],
)
def test_a_run_without_a_directory_is_named_after_its_model(model, directory):
    choices = {"model": model, "train": ["a.jsonl"]}
    assert default_directory(choices) == directory
    run = dataclasses.replace(flat_request(choices).read())
    assert run.directory == directory


def test_every_option_of_a_method_is_used_by_one():
    used = {given.option for method in METHODS.values() for given in method.options()}
    options = {option.name for option in TABLE if option.group == METHOD}
    assert options - {"method"} <= used
