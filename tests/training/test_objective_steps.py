"""Steps and runs with objectives other than the mean loss."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.parameters import merge
from prompt_tuning.losses.class_objective import ClassObjective
from prompt_tuning.losses.token_objective import TokenObjective
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.sweep_step import compile_sweep_step
from tests.support import dummies
from tests.support.exhaustive import sample
from tests.support.small_runs import LENGTH, logged, write_pairs

LABELS = ["a", "b"]
PROMPT = "decoder/prompt/prompt"
# Of unequal weight, so that a mean of means would be detected.
SIZES = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2), (5, 2), (1, 1), (4, 4)]
TOKENS = {
    "t5x": TokenObjective(0.01, 0.1, None),
    "constant": TokenObjective(normalizer=7.0),
    "targets": TokenObjective(0.01, normalizer="num_total_target_tokens"),
    "sequences": TokenObjective(label_smoothing=0.1, normalizer="average_per_sequence"),
}
CLASSES = {
    "cross_entropy": ClassObjective(LABELS),
    "hinge": ClassObjective(LABELS, "hinge", length_normalize=False),
}
OBJECTIVES = TOKENS | CLASSES


def make_batch(objective, config=dummies.LLAMA):
    """Eight rows; with classes, two for each of four examples, the last a filler."""
    batch = dummies.make_batch(config, dummies.random_rows(SIZES))
    if isinstance(objective, TokenObjective):
        return batch
    batch.loss_weights[6:] = 0
    return dataclasses.replace(batch, gold=np.array([1, 0, 0, -1], np.int32))


def prepared(config=dummies.LLAMA):
    graph, parameters = dummies.prompted(config)
    trained, frozen = parameter_groups.partition(parameters, {PROMPT: 0})
    return graph, trained, frozen


def plain_loss(graph, parameters, batch, objective):
    """The same formulas on all logits at once, without a custom backward pass."""
    model: Any = merge(graph, parameters)
    logits = model.logits(model.hidden(batch))
    targets = jnp.take_along_axis(batch.targets, batch.loss_positions, axis=1)
    log_softmax = jax.nn.log_softmax(logits)
    hit = jax.nn.one_hot(targets, dummies.V)
    nll, weights = -jnp.sum(hit * log_softmax, -1), batch.loss_weights
    if isinstance(objective, TokenObjective):
        s = objective.label_smoothing
        target_distribution = hit * (1 - s) + (1 - hit) * s / (dummies.V - 1)
        losses = jnp.sum(
            jax.scipy.special.xlogy(target_distribution, target_distribution), -1
        )
        losses -= jnp.sum(target_distribution * log_softmax, -1)
        losses += objective.z_loss * jax.nn.logsumexp(logits, -1) ** 2
        if objective.normalizer == "average_per_sequence":
            return jnp.mean(jnp.sum(weights * losses, -1) / jnp.sum(weights, -1))
        divisor = {
            None: 1,
            7.0: 7,
            "num_total_target_tokens": batch.targets.size,
            "num_real_target_tokens": weights.sum(),
        }
        return jnp.sum(weights * losses) / divisor[objective.normalizer]
    scores = -jnp.sum(weights * nll, -1)[:6]
    if objective.length_normalize:
        scores /= jnp.sum(weights, -1)[:6]
    scores, gold = scores.reshape(3, 2), batch.gold[:3]
    gold_scores, other = scores[np.arange(3), gold], scores[np.arange(3), 1 - gold]
    if objective.loss == "hinge":
        return jnp.mean(jnp.maximum(0, 0.2 + other - gold_scores))
    return jnp.mean(jnp.log1p(jnp.exp(other - gold_scores)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sample(1, OBJECTIVES))
def test_the_gradient_equals_the_formula_in_one_batch_and_in_micro_batches(name):
    objective = OBJECTIVES[name]
    graph, trained, frozen = prepared()
    batch = make_batch(objective)
    plain = jax.value_and_grad(
        lambda own, batch: plain_loss(graph, own | frozen, batch, objective)
    )
    value, expected = jax.jit(plain)(trained, batch)
    assert np.abs(expected[PROMPT]).max() > 1e-3

    compute = jax.jit(functools.partial(gradients, graph, objective=objective))
    cut = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    for form in (batch, cut):
        gradient, sums = compute(trained, frozen, form, None)
        np.testing.assert_allclose(
            sums.loss / objective.divisor(form), value, rtol=1e-5
        )
        np.testing.assert_allclose(gradient[PROMPT], expected[PROMPT], atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_penalty_is_added_once(monkeypatch, accumulate):
    """Half the squared norm of the prompt, whose gradient is the prompt.

    A step of gradient descent at rate 1 moves by exactly the gradient.
    """

    def penalty(model):
        return 0.5 * jnp.sum(model.decoder.prompt.prompt[...] ** 2)

    graph, trained, frozen = prepared()
    batch = make_batch(TokenObjective())
    if accumulate > 1:
        batch = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    optimizer = optax.sgd(1.0)
    vectors = np.array(trained[PROMPT])

    def stepped():
        start = {PROMPT: jnp.array(vectors)}
        state = TrainState.create(start, optimizer, jax.random.key(0))
        step = compile_step(graph, optimizer, dropout=False)
        following, metrics = step(state, frozen, batch)
        return vectors - following.trained[PROMPT], metrics

    plain, before = stepped()
    assert "penalty" not in before

    monkeypatch.setattr(LanguageModel, "has_penalty", True)
    monkeypatch.setattr(LanguageModel, "penalty", penalty)
    added, metrics = stepped()
    np.testing.assert_allclose(added, plain + vectors, atol=1e-5)
    np.testing.assert_allclose(metrics["penalty"], 0.5 * np.sum(vectors**2), rtol=1e-5)
    np.testing.assert_allclose(
        metrics["loss"], before["loss"] + metrics["penalty"], rtol=1e-6
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cross_entropy"])
def test_members_of_a_sweep_train_as_they_would_alone(name):
    objective = OBJECTIVES[name]
    graph, trained, frozen = prepared()
    batch, optimizer = make_batch(objective), parameter_groups.adafactor(0.1)
    states = [
        TrainState.create(
            {PROMPT: trained[PROMPT] * scale}, optimizer, jax.random.key(0)
        )
        for scale in (1.0, 0.5)
    ]
    alone = compile_step(graph, optimizer, dropout=False, objective=objective)
    together = compile_sweep_step(
        graph,
        [optimizer] * 2,
        own_batches=False,
        dropout=False,
        objective=objective,
    )
    copies = tuple(jax.tree.map(jnp.copy, state) for state in states)
    following, metrics = together(copies, frozen, batch)
    for k, state in enumerate(states):
        expected, expected_metrics = alone(state, frozen, batch)
        for metric, value in expected_metrics.items():
            np.testing.assert_allclose(metrics[k][metric], value, rtol=1e-5)
        np.testing.assert_allclose(
            following[k].trained[PROMPT], expected.trained[PROMPT], atol=1e-4
        )


def test_evaluation_measures_plain_nats():
    graph, trained, frozen = prepared()
    batch = make_batch(TokenObjective())
    sums = jax.jit(functools.partial(loss_sums, graph))(trained | frozen, batch)
    plain = jax.jit(
        lambda batch: plain_loss(graph, trained | frozen, batch, TokenObjective())
    )
    np.testing.assert_allclose(sums.loss / sums.weight, plain(batch), rtol=1e-5)


# Seven of eight completions are "yes".
CLASS_PAIRS = [
    (f"{a}{b}=", "no" if i % 8 == 3 else "yes")
    for i, (a, b) in enumerate(zip("abcdefghijklmnop" * 2, "qrstuvwx" * 4, strict=True))
]
LOSS_FILES = {
    "reference": {},
    "label_smoothing": {},
    "class_cross_entropy": {"CLASS_LABELS": ["yes", "no"]},
    "class_hinge": {"CLASS_LABELS": ["yes", "no"]},
}


def tune_on_classes(files, tmp_path, loss, model=None, **macros) -> int:
    pairs = write_pairs(tmp_path / "classes.jsonl", CLASS_PAIRS)
    choices = {
        "TRAIN_FILES": str(pairs),
        "EVALUATION_FILES": str(pairs),
        "Run.steps": 24,
        "adafactor.learning_rate": 0.3,
    }
    choices |= LOSS_FILES[loss] | macros
    arguments = files.arguments(tmp_path / "run", model, **choices)
    return main(
        ["train", arguments[0], f"--gin_file=losses/{loss}.gin", *arguments[1:]]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("loss", "family"),
    sample(
        1,
        [
            ("reference", "t5"),
            ("label_smoothing", "t5"),
            ("class_cross_entropy", "decoder"),
            ("class_hinge", "t5"),
        ],
    ),
)
def test_a_run_lowers_its_loss(files, tmp_path, loss, family):
    assert tune_on_classes(files, tmp_path, loss, getattr(files, family)) == 0
    losses = [line["loss"] for line in logged(tmp_path / "run") if "loss" in line]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:2])


@pytest.mark.exhaustive
def test_micro_batches_of_examples_with_classes(files, tmp_path):
    assert (
        tune_on_classes(
            files,
            tmp_path,
            "class_cross_entropy",
            **{"Run.accumulate": 2, "Run.steps": 2},
        )
        == 0
    )
    first = logged(tmp_path / "run")[0]
    # With 16 examples every accuracy is a multiple of 1/16.
    assert (first["accuracy"] * 16) % 1 == pytest.approx(0, abs=1e-5)


@pytest.mark.exhaustive
def test_a_sweep_over_seeds_with_classes(files, tmp_path):
    """Each member reads examples in its own order, and learns as if alone."""
    pairs = str(write_pairs(tmp_path / "classes.jsonl", CLASS_PAIRS))
    choices = LOSS_FILES["class_hinge"] | {"Run.steps": 2, "TRAIN_FILES": pairs}
    choices |= {"EVALUATION_FILES": pairs, "Run.evaluate_every": 0}

    def arguments(name, **more):
        options = files.arguments(tmp_path / name, **choices, **more)
        return [options[0], "--gin_file=losses/class_hinge.gin", *options[1:]]

    vary = ["--vary", "Run.seed=0,1"]
    assert main(["sweep", *arguments("sweep"), *vary]) == 0
    assert main(["train", *arguments("alone", **{"Run.seed": 1})]) == 0
    (member,) = (tmp_path / "sweep").glob("*seed=1*")
    options, alone = (
        [
            [line[name] for name in ("loss", "accuracy", "gradient_norm")]
            for line in logged(directory)
            if "loss" in line
        ]
        for directory in (member, tmp_path / "alone")
    )
    assert len(alone) == 2
    np.testing.assert_allclose(options, alone, rtol=1e-3)


def test_packing_is_refused_with_classes(files, tmp_path, capsys):
    macros = {"DataSource__packing": True}
    assert tune_on_classes(files, tmp_path, "class_hinge", **macros) == 2
    message = capsys.readouterr().err
    assert "packing is True, but Run.objective is a ClassObjective" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["yes", "nope"],
            "line 4: the completion is 'no', which is none of the",
        ),
        (["yes", "no", "n" * 70], "the longest label 71: expected at most"),
    ],
)
def test_labels_that_do_not_fit_the_data(files, tmp_path, capsys, labels, message):
    chosen = {"CLASS_LABELS": labels, "Run__evaluation": None}
    pairs = write_pairs(tmp_path / "classes.jsonl", CLASS_PAIRS)
    arguments = files.arguments(tmp_path / "run", TRAIN_FILES=str(pairs), **chosen)
    arguments.insert(1, "--gin_file=losses/class_hinge.gin")
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert LENGTH + 71 > 64


def test_a_sweep_with_separate_orders_refuses_to_count_padding(files, tmp_path, capsys):
    arguments = files.arguments(
        tmp_path / "sweep",
        Run__steps=2,
        **{"TokenObjective.normalizer": "num_total_target_tokens"},
    )
    arguments.insert(1, "--gin_file=losses/average_per_sequence.gin")
    assert main(["sweep", *arguments, "--vary", "Run.seed=0,1"]) == 2
    assert "which counts that padding" in capsys.readouterr().err
