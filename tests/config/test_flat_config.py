"""Options without a config: gin files and bindings, and the run that they describe."""

import re
from pathlib import Path
from typing import Any

import pytest

import prompt_tuning as pt
from prompt_tuning.config.config_changes import compare_configs
from prompt_tuning.config.config_table import choices_of, find_choice, list_rates
from prompt_tuning.config.flat_config import flat_config
from prompt_tuning.config.flat_option import METHOD
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.operative_config import complete_config
from prompt_tuning.config.option_checks import check_training, default_directory
from prompt_tuning.config.options import OPTIONS, TABLE
from prompt_tuning.config.python_runs import tune_request
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError

MODEL = "bundled:skills-decoder"
RECORDED = Path(__file__).parents[1] / "fixtures/recorded_options"
GIVEN = {"model": MODEL, "train": ["a.jsonl"], "eval": ["b.jsonl"], "out": "run"}
NEEDED = {
    "labels": ["x", "y"],
    "prompt_text": "hi",
    "prompt_file": "p.npy",
    "prompt_examples": str(Path(__file__).parents[1] / "fixtures/shots.jsonl"),
    "tasks": 3,
    "shared_features": 4,
    "task_features": 12,
    "reward": ["exact_match"],
    "add_tokens": ["<a>"],
}
OF_DISTILLATION = ("context", "context_key")
NEEDED_MACROS = {OPTIONS[name].macro: name for name in (*NEEDED, *OF_DISTILLATION)}


def read_flat(choices: dict[str, Any], bindings=(), **permissions) -> Run:
    files, lines = flat_config(choices, bindings)
    return read_run(files, bindings, defaults=lines, **permissions)


def config_of(**choices) -> str:
    read_flat(GIVEN | choices)
    return complete_config()


def has_defaults(config: str) -> bool:
    """Returns whether gin saw the defaults of factories, which type checks hide."""
    return "Run.log_every = " in config


def is_same_run(before: str, after: str) -> bool:
    complete = has_defaults(after)
    changes = compare_configs(before, after, complete=complete)
    return changes.learning == () and not (complete and changes.any_allowed)


def needed_of(option: str, name: str) -> dict[str, Any]:
    """Returns the options that a method or loss needs, with values."""
    needed = find_choice(option, name).needed
    names = [NEEDED_MACROS[macro] for macro in needed if macro in NEEDED_MACROS]
    return {name: NEEDED.get(name, "hi") for name in names}


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


def test_python_continues_a_run_of_options():
    flat = config_of(
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
    assert is_same_run(flat, python) and is_same_run(python, flat)
    other = flat.replace("LEARNING_RATE = 0.002", "LEARNING_RATE = 0.003")
    complete = has_defaults(flat)
    assert compare_configs(python, other, complete=complete).learning == (
        "warmup_linear_decay.peak = 0.002, now 0.003",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", choices_of("method"))
def test_a_method_trains_what_its_config_names(name):
    file = find_choice("method", name)
    run = read_flat(GIVEN | {"method": name} | needed_of("method", name))
    config = complete_config()
    assert bool(run.prompt) == ("@" in file.values.get("Run.prompt", ""))
    assert all(f"@{trained}" in config for trained in file.trained)
    optimizer, rate = file.optimizer
    assert f"ParameterGroup.optimizer = @{optimizer}()" in config
    assert f"LEARNING_RATE = {rate}" in config
    if "PROMPT_LENGTH" in file.macros:
        assert "PROMPT_LENGTH = 20" in config


@pytest.mark.parametrize("loss", choices_of("loss"))
def test_a_loss_is_the_objective_of_its_config(loss):
    run = read_flat(GIVEN | {"loss": loss} | needed_of("loss", loss))
    objective = find_choice("loss", loss).values["Run.objective"]
    name = "None" if run.objective is None else f"@{type(run.objective).__name__}()"
    assert name == objective


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        (
            "lora",
            {"method": "lora", "rank": 4, "optimizer": "adamw"}
            | {"schedule": "linear", "steps": 77},
        ),
        ("encoder_and_decoder", {"method": "encoder_and_decoder"}),
        ("class_hinge", {"loss": "class_hinge", "labels": ["x", "y"], "eval": None}),
    ],
)
def test_the_same_options_continue_a_run_of_an_earlier_version(name, choices):
    """Options were written in another form before they were gin files."""
    recorded = (RECORDED / f"{name}.gin").read_text()
    given = {k: x for k, x in (GIVEN | choices).items() if x is not None}
    read_flat(given)
    assert is_same_run(recorded, complete_config())


def test_python_trains_a_method_as_its_config_does():
    prompt = pt.SoftPrompt(length=20, initializer=pt.from_sampled_vocabulary())
    for name, method in (
        ("soft", prompt),
        ("ia3", pt.IA3()),
        ("projected_prefix", pt.ProjectedKeyValuePrefix(length=20)),
    ):
        python, flat = python_config(method), config_of(method=name)
        assert is_same_run(python, flat)


def test_the_learning_rates_in_help_are_those_of_the_methods():
    assert list_rates() == (
        "0.3 with adafactor; 0.02 with adamw for decoder_prefix, memory, "
        "prefix, projected_prefix, state_prefix; 0.005 with adamw for text_prefix; "
        "0.001 with adamw for class_head, lora; 0.03 with adamw for ia3; "
        "0.01 with adamw for tokens"
    )


def test_bindings_override_options_and_reach_parts_that_options_leave_out():
    bindings = ["Prompting.placement = 'suffix'", "Run.seed = 5", "LoRA.alpha = 2.0"]
    with pytest.raises(InputError, match=r"LoRA\.alpha has no effect"):
        read_flat(GIVEN, bindings)
    run = read_flat(GIVEN | {"seed": 1}, bindings[:2])
    assert run.seed == 5 and run.prompting is not None
    assert run.prompting.placement == "suffix"


def test_options_of_token_types_apply_to_training_and_held_out_data():
    run = read_flat(GIVEN)
    assert run.source.use_token_type_ids is None
    choices = {"use_token_type_ids": True, "prompt_loss_weight": 0.1}
    run = read_flat(GIVEN | choices | {"on_nothing_learned": "skip"})
    assert run.evaluation is not None
    for data in (run.source, run.evaluation.data):
        assert data.use_token_type_ids and data.prompt_loss_weight == 0.1
        assert data.on_nothing_learned == "skip"


def test_a_template_places_the_vectors():
    run = read_flat(GIVEN | {"template": "{soft:20} Say {prompt}"})
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
        ("schedule", "linear", "--gin_file schedules/linear.gin"),
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


@pytest.mark.parametrize("head", [{"head": "last"}, {"method": "class_head"}])
def test_a_head_of_one_number_may_have_a_name(head):
    choices = {**GIVEN, **head, "problem": "regression", "eval": ["a.jsonl"]}
    for labels in (None, ["score"]):
        given = choices | ({"labels": labels} if labels else {})
        run = read_flat(given)
        assert run.tuning.class_head is not None
        assert run.tuning.class_head.labels == labels
        assert run.evaluation is not None and run.evaluation.labels is None


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
    assert read_flat(choices).directory == directory


def test_every_option_of_a_method_is_used_by_one():
    files = choices_of("method").values()
    used = {macro for file in files for macro in file.macros}
    options = {option.macro for option in TABLE if option.group == METHOD}
    assert options - {""} <= used
