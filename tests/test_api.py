"""The Python interface, on the bundled decoder."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.config.deferred_factories import factory_named, factory_signature
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.core.parameters import Parameters
from tests.support.small_runs import clean_process

__all__ = ["clean_process"]

WORDS = ["apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house"]
PAIRS = [(f"{word}=", word[1:]) for word in WORDS]
MODEL = "bundled:skills-decoder"
STEPS = 4


def test_the_package_lists_only_its_interface():
    assert dir(pt) == sorted(pt.__all__)
    assert not {"api", "MODULES", "importlib", "annotations"} & {*dir(pt)}


@pytest.fixture(scope="module")
def model():
    return pt.load(MODEL)


def tune(model, directory, method=None, **choices):
    method = pt.SoftPrompt(length=3) if method is None else method
    settings = {"steps": STEPS, "batch_size": 8, "progress": False} | choices
    return pt.tune(model, method, PAIRS, directory=directory, **settings)


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    return tune(model, directory, evaluation=PAIRS[:4], evaluate_every=2)


def result_of(tuned: pt.TunedModel) -> pt.TrainingResult:
    """The outcome of training a model."""
    assert tuned.result is not None
    return tuned.result


def bitwise_equal(one: Parameters, other: Parameters) -> bool:
    """Returns whether parameters are bitwise equal."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[path], other[path]) for path in one
    )


def test_every_gin_name_is_a_public_name():
    assert set(pt.CONFIGURABLE) == FACTORIES.keys() - {
        "Run",
        "ObjectiveFromPython",
        "optimizer_from_python",
        "prompt_from_python",
    }
    for name in pt.__all__:
        assert getattr(pt, name) is not None


def test_settings_have_the_factory_s_parameters_without_the_run_s():
    assert list(pt.SoftPrompt.__signature__.parameters) == ["length", "initializer"]
    assert "Lester et al. 2021" in str(pt.SoftPrompt.__doc__)
    assert repr(pt.LoRA(rank=4)) == "LoRA(rank=4)"
    for factory in FACTORIES:
        assert factory_signature(factory_named(factory)) is not None


@pytest.mark.slow
def test_every_command_reads_a_directory_created_by_python(tuned, tmp_path, capsys):
    run = str(tuned.directory)
    assert main(["generate", "--run", run, "world=", "--new_tokens", "4"]) == 0
    assert tuned.generate("world=", new_tokens=4)[0].text in capsys.readouterr().out
    assert main(["evaluate", "--run", run]) == 0
    assert main(["inspect", "--run", run]) == 0
    assert main(["convert", run, str(tmp_path / "adapter")]) == 0
    capsys.readouterr()
    assert main(["train", "--gin_file", f"{run}/config.gin"]) == 0
    assert f"all {STEPS} steps are already done" in capsys.readouterr().out


def test_python_and_the_command_train_the_same_bits(tuned, tmp_path):
    file = tmp_path / "train.jsonl"
    rows = [json.dumps({"prompt": p, "completion": c}) for p, c in PAIRS]
    file.write_text("\n".join(rows))
    bindings = {
        "MODEL": f"'{MODEL}'",
        "TRAIN_FILES": f"'{file}'",
        "EVALUATION_FILES": f"'{file}'",
        "RUN_DIRECTORY": f"'{tmp_path / 'run'}'",
        "BATCH_SIZE": 8,
        "STEPS": STEPS,
        "PROMPT_LENGTH": 3,
        "adafactor.learning_rate": 0.3,
        "SoftPrompt.initializer": None,
        "Run.evaluation": None,
    }
    options = [f"--gin.{name}={value}" for name, value in bindings.items()]
    config = "runs/first_prompt.gin"
    assert main(["train", "--gin_file", config, *options]) == 0
    other = pt.load_tuned(tmp_path / "run")
    full = tune(MODEL, tmp_path / "python")
    assert bitwise_equal(full.trained, other.trained)


def test_a_run_is_loaded_again_and_resumed(model, tuned):
    again = pt.load_tuned(tuned.directory)
    assert bitwise_equal(again.trained, tuned.trained)
    rerun = tune(model, tuned.directory, evaluation=PAIRS[:4], evaluate_every=2)
    assert (
        bitwise_equal(rerun.trained, tuned.trained) and result_of(rerun).step == STEPS
    )


def test_the_frozen_model_is_read_once(model, tuned):
    path = "decoder/layers/mlp/up/kernel"
    assert tuned.parameters[path] is model.parameters[path]


@pytest.mark.parametrize("form", ["peft", "npy", "safetensors"])
def test_saved_adapters_are_loaded_with_their_base(tuned, tmp_path, form):
    suffix = "" if form == "peft" else f".{form}"
    file = tuned.save(tmp_path / f"adapter{suffix}", form=form)
    loaded = pt.load_tuned(file, base=MODEL)
    assert bitwise_equal(loaded.trained, tuned.trained)
    with pytest.raises(pt.InputError, match="base="):
        pt.load_tuned(file)


def test_evaluation_and_vectors(tuned):
    (metrics, again) = (tuned.evaluate(), tuned.evaluate(PAIRS[:4]))
    assert metrics == again and metrics["loss"] == tuned.result.metrics["loss"]
    assert "exact_match" in tuned.evaluate(PAIRS[:4], exact_match=True)
    ((path, vectors),) = tuned.prompt_vectors().items()
    assert path == "decoder/prompt" and vectors.shape == (3, 128)
    assert f"step {STEPS}" in repr(tuned) and "384 trained" in repr(tuned)


def test_rows_may_be_mappings_files_or_an_iterator(model, tmp_path):
    rows = [{"prompt": p, "completion": c} for p, c in PAIRS]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = [
        next(model.attach(pt.SoftPrompt(length=3)).batches(data, batch_size=8))
        for data in (PAIRS, rows, iter(rows), file, [str(file)], {"train": PAIRS})
    ]
    for batch in batches[1:]:
        np.testing.assert_array_equal(batch.tokens, batches[0].tokens)


def test_several_methods_have_separate_groups(model, tmp_path):
    methods = [pt.SoftPrompt(length=3), pt.LoRA(rank=2)]
    both = tune(model, tmp_path / "run", methods)
    assert len(both.trained) == 5
    rates = {str(group.regexes) for group in both.run.groups}
    assert len(rates) == 2


def test_an_optax_optimizer_and_a_loss_function(model, tmp_path):
    def doubled(logits, targets):
        return 2 * optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    ours = tune(model, tmp_path / "ours", optimizer=optax.sgd(0.5), seed=1)
    theirs = tune(
        model, tmp_path / "theirs", optimizer=optax.sgd(0.25), objective=doubled, seed=1
    )
    for path in ours.trained:
        np.testing.assert_allclose(
            ours.trained[path], theirs.trained[path], rtol=1e-3, atol=1e-5
        )
    # The config cannot contain either; the directory is read nevertheless.
    again = pt.load_tuned(tmp_path / "theirs")
    assert bitwise_equal(again.trained, theirs.trained)


def test_the_command_refuses_a_run_configured_from_python(model, tmp_path, capsys):
    tune(model, tmp_path / "run", optimizer=optax.sgd(0.5))
    assert main(["train", "--gin_file", f"{tmp_path}/run/config.gin"]) == 2
    assert "configured from Python" in capsys.readouterr().err


def test_a_callback_receives_metrics_and_stops_the_run(model, tmp_path):
    seen = []

    def callback(step, metrics):
        seen.append((step, sorted(metrics)))
        return step >= 2

    stopped = tune(
        model, tmp_path / "run", callbacks=[callback], log_every=1, evaluation=PAIRS[:2]
    )
    assert not result_of(stopped).finished
    assert result_of(stopped).step < STEPS
    assert "loss" in seen[0][1]
    rest = tune(model, tmp_path / "run", log_every=1, evaluation=PAIRS[:2])
    assert result_of(rest).finished


@pytest.mark.exhaustive
def test_the_pure_functions_train_the_same_parameters(model, tmp_path):
    attached = model.attach(pt.SoftPrompt(length=3))
    trained, frozen = attached.partition()
    optimizer = optax.sgd(0.5)
    state = pt.TrainState.create(trained, optimizer, jax.random.key(0))
    for batch in attached.batches(PAIRS, batch_size=8, steps=2):
        gradient, _ = pt.gradients(attached.graph, state.trained, frozen, batch, None)
        state, metrics = pt.train_step(
            state,
            frozen,
            batch,
            graph=attached.graph,
            optimizer=optimizer,
            dropout=False,
        )
        assert gradient.keys() == trained.keys() and metrics["loss"] > 0
    hidden = attached.hidden(batch, {**frozen, **state.trained})
    assert hidden.shape == (8, batch.loss_positions.shape[1], 128)


UNTYPED: Any = pt
"""The package for mistakes that a type checker reports."""

BAD = {
    "no parameter": (
        lambda: UNTYPED.SoftPrompt(lenth=3),
        "no parameter 'lenth'.*length",
    ),
    "no model": (lambda: pt.load("/no/such/folder"), "does not exist"),
    "no argument": (
        lambda: UNTYPED.tune(MODEL, pt.SoftPrompt(length=3), PAIRS, step=3),
        "no argument 'step'.*steps",
    ),
    "another length": (
        lambda: pt.tune(
            MODEL, pt.SoftPrompt(length=3), PAIRS, template="{soft:5}{prompt}"
        ),
        r"give SoftPrompt\(length=5\), or change the template",
    ),
    "no setting": (
        lambda: UNTYPED.tune(MODEL, pt.SoftPrompt(length=3), PAIRS, learnig_rate=1),
        "did you mean learning_rate",
    ),
    "no rows": (lambda: pt.tune(MODEL, pt.SoftPrompt(length=3), []), "no rows"),
    "odd row": (
        lambda: pt.tune(MODEL, pt.SoftPrompt(length=3), [("a", "b", "c")]),
        "data, row 0 is",
    ),
    "another key": (
        lambda: pt.tune(
            MODEL,
            pt.SoftPrompt(length=3),
            PAIRS,
            evaluation=[*PAIRS, {"text": "a", "completion": "b"}],
            steps=1,
        ),
        rf"^evaluation, row {len(PAIRS)}: found the keys .*key with prompt_key='KEY'$",
    ),
    "another split": (
        lambda: pt.tune(MODEL, pt.SoftPrompt(length=3), {"test": PAIRS}),
        "data has the splits ..test.., expected one named 'train'",
    ),
    "no method": (lambda: pt.tune(MODEL, [], PAIRS), "no method"),
    "not a method": (lambda: UNTYPED.tune(MODEL, [3], PAIRS), "method 3 is an int"),
    "a method's name": (
        lambda: UNTYPED.tune(MODEL, "lora", PAIRS),
        r"method 'lora' is a str.*LoRA\(rank=8\)",
    ),
    "labels": (
        lambda: UNTYPED.tune(MODEL, pt.SoftPrompt(length=3), PAIRS, labels=["a", "b"]),
        r"evaluation=Evaluation\(data=..., labels=...\)",
    ),
    "a metric of nothing": (
        lambda: pt.tune(MODEL, pt.SoftPrompt(length=3), PAIRS, keep_best="accuracy"),
        "keep_best has no effect: there is no evaluation",
    ),
    "too long": (
        lambda: pt.tune(MODEL, pt.SoftPrompt(length=0), PAIRS),
        "length is 0",
    ),
    "two rates": (
        lambda: pt.tune(
            MODEL,
            pt.SoftPrompt(length=3),
            PAIRS,
            optimizer=optax.sgd(1.0),
            learning_rate=1.0,
        ),
        "leave learning_rate out",
    ),
}


@pytest.mark.usefixtures("python_words")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    act, message = BAD[name]
    with pytest.raises(pt.InputError, match=message):
        act()
    assert list(Path.cwd().iterdir()) == []


def test_a_refused_run_leaves_nothing(model, tmp_path):
    with pytest.raises(pt.InputError):
        tune(model, tmp_path / "run", method=pt.SoftPrompt(length=0))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_built_from_dataclasses_has_a_config(model, tmp_path):
    run = pt.Run(
        directory=str(tmp_path / "run"),
        model=model.run.model,
        prompt=None,
        adapters=(pt.LoRA(rank=2).build(),),
        groups=[pt.ParameterGroup([".*/adapters/.*"], optax.sgd(0.1)).build()],
        data=pt.DataSource(files=str(write(tmp_path))).build(),
        steps=1,
    )
    pt.train(pt.open_run(run))
    assert main(["generate", "--run", run.directory, "world="]) == 0


def write(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": "ab=", "completion": "b"}\n' * 40)
    return file


def test_a_template_determines_where_the_vectors_stand(tmp_path):
    tuned = pt.tune(
        "bundled:skills-decoder",
        pt.SoftPrompt(length=5),
        [("apple", "pple"), ("bread", "read")],
        template="{soft:5}{prompt}=",
        steps=1,
        progress=False,
        directory=tmp_path / "run",
    )
    # BOS, the vectors, "garden" and "=".
    (completion,) = tuned.generate("garden", new_tokens=2)
    assert completion.given_tokens == 1 + 5 + 6 + 1
