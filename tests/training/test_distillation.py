"""Context distillation: the teacher, the loss, and training runs."""

import dataclasses
import functools
import json
from typing import Any

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prompt_tuning.api.tune import load, load_tuned
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_files
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.losses.context_distillation import Distillation
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.training.distillation import make_teacher
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from prompt_tuning.training.sweep_step import compile_sweep_step
from prompt_tuning.tuned.comparison import open_comparison
from scripts import skills
from scripts.bench import hlo
from tests.support import dummies
from tests.support.chunks import chunked
from tests.support.exhaustive import sample
from tests.support.small_runs import UPPER, logged, write_pairs

SIZES = [(4, 3), (1, 5), (6, 1), (3, 3)]
CONTEXT = [7, 4, 11, 9, 3]


def make_batch(config, rows):
    return jax.tree.map(jnp.asarray, dummies.make_batch(config, rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "placement"),
    [
        *((family, "prefix") for family in dummies.FAMILIES),
        ("llama", "after_bos"),
        ("gpt2", "after_bos"),
    ],
)
def test_the_teacher_is_the_frozen_model_that_reads_the_context(family, placement):
    config = dummies.FAMILIES[family]
    graph, frozen = dummies.unprompted(config)
    rows = dummies.random_rows(SIZES)
    at = int(placement == "after_bos")
    longer = [([*g[:at], *CONTEXT, *g[at:]], completion) for g, completion in rows]
    expected = dummies.logits(frozen, make_batch(config, longer), graph=graph)

    teacher = make_teacher(config, CONTEXT, placement)
    batch = make_batch(config, rows)
    hidden = jax.jit(teacher.hidden)(frozen, batch)
    plain: Any = merge(graph, frozen)
    actual = plain.logits(hidden)
    real = np.array(batch.loss_weights) > 0
    np.testing.assert_allclose(actual[real], expected[real], atol=1e-4)


@pytest.mark.parametrize("placement", ["prefix", "after_bos"])
def test_a_text_that_is_read_once_teaches_the_same_and_costs_nothing_later(placement):
    config = dummies.LLAMA
    _, frozen = dummies.unprompted(config)
    # All rows begin with the same token, as with BOS.
    rows = [([5, *given], done) for given, done in dummies.random_rows(SIZES)]
    batch, context = make_batch(config, rows), CONTEXT * 5
    teacher = make_teacher(config, context, placement)
    if placement == "after_bos":
        behind = make_teacher(config, [5, *context])
        teacher = dataclasses.replace(teacher, shared=behind)
    run = jax.jit(teacher.hidden)
    each, once = (
        run.lower(frozen | read, batch).compile()
        for read in ({}, teacher.read_context(frozen))
    )
    expected = each(frozen, batch)
    actual = once(frozen | teacher.read_context(frozen), batch)
    real = np.array(batch.loss_weights) > 0
    np.testing.assert_allclose(actual[real], expected[real], atol=1e-5)
    assert hlo.matmul_flops(once) < 0.7 * hlo.matmul_flops(each)


def test_a_text_of_512_tokens_costs_64_rows_an_eighth_of_what_each_would_pay():
    config = dummies.LLAMA
    _, frozen = dummies.unprompted(config)
    batch = make_batch(config, [([5] * 8, [6] * 8)] * 64)
    teacher = make_teacher(config, [5] + [7] * 511, "after_bos")
    shared = make_teacher(config, [5] + [7] * 511)
    read = jax.eval_shape(shared.read_context, frozen)
    costs = [
        hlo.matmul_flops(jax.jit(function).lower(*arguments).compile())
        for function, *arguments in (
            (teacher.hidden, frozen, batch),
            (shared.hidden, frozen | read, batch),
            (shared.read_context, frozen),
        )
    ]
    each, once, reading = costs
    assert 8 * (once + reading) <= each


def student(family="llama"):
    """Structure, trained and frozen leaves of a prompted model, and its objective."""
    config = dummies.FAMILIES[family]
    graph, parameters = dummies.prompted(config)
    path = f"{dummies.PROMPT_PATHS[config.architecture]}/prompt"
    trained, frozen = parameter_groups.partition(parameters, {path: 0})
    objective = Distillation(make_teacher(config, CONTEXT))
    return graph, trained, frozen, objective


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample(1, ["llama", "gpt2", "t5_gated"]))
def test_the_gradient_equals_the_divergences_in_one_batch_and_in_micro_batches(family):
    graph, trained, frozen, objective = student(family)
    batch = make_batch(dummies.FAMILIES[family], dummies.random_rows(SIZES))

    def divergence(trained):
        model: Any = merge(graph, trained | frozen)
        teacher_logits = model.logits(objective.teacher.hidden(frozen, batch))
        losses = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(model.logits(model.hidden(batch))),
            jax.nn.log_softmax(teacher_logits),
        )
        return jnp.average(losses, weights=batch.loss_weights)

    value, expected = jax.jit(jax.value_and_grad(divergence))(trained)
    compute = jax.jit(functools.partial(gradients, graph, objective=objective))
    cut = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), batch)
    for form in (batch, cut):
        gradient, sums = compute(trained, frozen, form, None)
        assert gradient.keys() == trained.keys()
        np.testing.assert_allclose(sums.loss / sums.weight, value, rtol=1e-4)
        for path, leaf in gradient.items():
            assert np.abs(leaf).max() > 1e-3
            np.testing.assert_allclose(leaf, expected[path], atol=2e-5)


def test_the_contexts_embeddings_have_no_loss():
    config = dummies.LLAMA
    graph, parameters = dummies.prompted(config, length=len(CONTEXT))
    path = "decoder/prompt/prompt"
    parameters[path] = parameters["token_embedder/embedding"][jnp.array(CONTEXT)]
    objective = Distillation(make_teacher(config, CONTEXT))
    batch = make_batch(config, dummies.random_rows(SIZES))
    measure = jax.jit(functools.partial(loss_sums, graph, objective=objective))
    sums = measure(parameters, batch)
    np.testing.assert_allclose(sums.loss / sums.weight, 0, atol=1e-5)


@pytest.mark.exhaustive
def test_members_of_a_sweep_share_one_teacher():
    graph, trained, frozen, objective = student()
    batch = make_batch(dummies.LLAMA, dummies.random_rows(SIZES))
    (path,), optimizer = trained, parameter_groups.adafactor(0.1)
    states = [
        TrainState.create({path: trained[path] * scale}, optimizer, jax.random.key(0))
        for scale in (1.0, 0.5)
    ]
    choices = {"dropout": False, "objective": objective}
    together = compile_sweep_step(graph, [optimizer] * 2, own_batches=False, **choices)
    alone = compile_step(graph, optimizer, **choices)
    copies = tuple(jax.tree.map(jnp.copy, state) for state in states)
    following, metrics = together(copies, frozen, batch)
    for k, state in enumerate(states):
        expected, measured = alone(state, frozen, batch)
        np.testing.assert_allclose(metrics[k]["loss"], measured["loss"], rtol=1e-5)
        moved = following[k].trained[path]
        np.testing.assert_allclose(moved, expected.trained[path], atol=1e-4)


def test_no_array_has_logits_of_all_positions_and_the_teacher_no_backward_pass(
    monkeypatch,
):
    chunked(monkeypatch, 4)
    graph, trained, frozen, objective = student()
    batch = make_batch(dummies.LLAMA, dummies.random_rows([(20, 5)] * 4))

    def products(objective):
        compute = functools.partial(gradients, graph, **objective)
        lowered = jax.jit(compute).lower(trained, frozen, batch, None)
        return lowered.compile()

    plain, distilled = products({}), products({"objective": objective})
    sizes = [
        np.prod(shape)
        for shape in hlo.array_shapes(distilled)
        if dummies.V in shape and dummies.LLAMA.width not in shape
    ]
    assert max(sizes) < 4 * 5 * dummies.V
    # A second forward and backward pass would double it; the teacher runs forward only.
    ratio = hlo.matmul_flops(distilled) / hlo.matmul_flops(plain)
    assert 1.3 < ratio < 1.7


def tune(files, directory, *bindings, **macros):
    """Returns the command's exit code for a run with the bindings' objective."""
    arguments = files.arguments(directory, **macros)
    return main(["train", *arguments, *(f"--gin.{binding}" for binding in bindings)])


DISTILL = (
    "Run.objective=@ContextDistillation()",
    "ContextDistillation.context='a text to stand for'",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["decoder", "t5"])
def test_a_run_learns_the_output_that_the_context_causes(files, tmp_path, family):
    macros = {"Run.steps": 24, "adafactor.learning_rate": 0.1}
    assert tune(files, tmp_path, *DISTILL, model=getattr(files, family), **macros) == 0
    losses = [line["loss"] for line in logged(tmp_path) if "loss" in line]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:2])


def opened(files, directory, *bindings, **macros):
    """Returns the objective of a run that is opened but not trained."""
    arguments = files.arguments(directory, **macros)[1:]
    given = [*(a.removeprefix("--gin.") for a in arguments), *bindings]
    named = [binding.replace("=", " = ", 1) for binding in given]
    run = plan_run(gin_files.read_run(["runs/first_prompt.gin"], named))
    objective: Any = run.objective(run.examples())
    return objective


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.exhaustive
def test_an_evaluation_measures_the_divergence_and_the_cross_entropy(files, tmp_path):
    directory = tmp_path / "run"
    assert tune(files, directory, *DISTILL, **{"Run.steps": 2}) == 0
    measured = [
        {name.removeprefix("evaluation/"): x for name, x in line.items()}
        for line in logged(directory)
        if "evaluation/loss" in line
    ][-1]

    # Two passes over the same tokens: with the prompt, and frozen with the context.
    rows = [
        (
            [skills.BOS_ID, *skills.encode(given)],
            [*skills.encode(answer), skills.EOS_ID],
        )
        for given, answer in UPPER[32:]
    ]
    context = skills.encode("a text to stand for")
    longer = [([*g[:1], *context, *g[1:]], answer) for g, answer in rows]
    tuned = load_tuned(directory)
    frozen = load(files.decoder)
    batches = [make_batch(tuned.config, each) for each in (rows, longer)]
    student, teacher = (
        log_softmax(dummies.logits(model.parameters, batch, graph=model.graph))
        for model, batch in zip((tuned, frozen), batches, strict=True)
    )
    real = np.array(batches[0].loss_weights) > 0
    divergence = (np.exp(teacher) * (teacher - student)).sum(-1)
    assert measured["loss"] == pytest.approx(divergence[real].mean(), rel=1e-4)
    targets = np.concatenate([answer for _, answer in rows])
    nats = -student[real][np.arange(len(targets)), targets]
    assert measured["cross_entropy"] == pytest.approx(nats.mean(), rel=1e-4)

    # `Run.keep_best` chooses by the divergence.
    folder = directory / FOLDER / f"checkpoint_{measured.pop('step')}"
    assert checkpoint_files.read_state(folder)["metrics"] == measured
    assert tuned.evaluate() == pytest.approx(measured, rel=1e-5)
    run = read_run_directory(directory)
    assert run.evaluation is not None
    texts = ["a text to stand for"]
    _, with_text = open_comparison(run, run.evaluation, text_prompts=texts)
    compared = with_text.evaluator(with_text.read())
    assert compared["loss"] == pytest.approx(0, abs=1e-5)


def write_bare_rows(path, rows):
    with h5py.File(path, "w") as file:
        file["input_ids"] = np.array(rows, np.int32)
        file["token_type_ids"] = np.ones_like(file["input_ids"])
    return str(path)


def test_the_context_follows_bos_at_any_position(files, tmp_path):
    context = skills.encode("a text to stand for")
    in_rows = opened(files, tmp_path / "a", *DISTILL).teacher
    assert in_rows.tokens == tuple(context)
    bare = write_bare_rows(tmp_path / "rows.hdf5", [[5, 6, 7], [8, 9, 10]])
    ahead = opened(files, tmp_path / "b", *DISTILL, TRAIN_FILES=bare).teacher
    assert ahead.tokens == (skills.BOS_ID, *context)
    encoder = opened(files, tmp_path / "c", *DISTILL, model=files.t5).teacher
    assert encoder.tokens == tuple(context)
    assert encoder.prompt == "encoder/prompt/prompt"


LONG = "ContextDistillation.context='" + "x" * 50 + "'"


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (("ContextDistillation.context=''",), "context is empty: give the text"),
        ((LONG,), r"the context has 50 tokens, and with the longest .* 64 positions"),
        (
            ("ParameterGroup.regexes=['.*']",),
            "the run trains .*, which the frozen model",
        ),
        (
            (
                "DataSource.template='{soft:4}{prompt}'",
                "Prompting.placement='template'",
                "Run.prompting=@Prompting()",
            ),
            "a template puts vectors among the tokens",
        ),
    ],
)
def test_unsupported_teachers_are_refused(files, tmp_path, bindings, message):
    with pytest.raises(InputError, match=message):
        opened(files, tmp_path, *DISTILL, *bindings)


def test_all_rows_or_none_begin_with_bos(files, tmp_path):
    rows = [[skills.BOS_ID, 6, 7], [8, 9, 10]]
    mixed = write_bare_rows(tmp_path / "rows.hdf5", rows)
    with pytest.raises(
        InputError, match=r"of the first 2 examples some begin with BOS"
    ):
        opened(files, tmp_path, *DISTILL, TRAIN_FILES=mixed)


def write_advantages(path):
    lines = [
        {"prompt": "abc=", "completion": answer, "advantages": advantage}
        for answer, advantage in (("yes", 1.0), ("no", -0.1))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 8))
    return str(path)


@pytest.mark.exhaustive
def test_a_policy_makes_texts_with_a_positive_advantage_more_likely(files, tmp_path):
    macros = {
        "TRAIN_FILES": write_advantages(tmp_path / "a.jsonl"),
        "EVALUATION_FILES": str(write_pairs(tmp_path / "yes.jsonl", [("abc=", "yes")])),
        "Run.steps": 24,
        "Run.evaluate_every": 4,
        "DataSource.buckets": 1,
        "adafactor.learning_rate": 0.3,
    }
    arguments = files.arguments(tmp_path / "run", **macros)
    arguments.insert(1, "--gin_file=losses/policy_gradient.gin")
    assert main(["train", *arguments]) == 0
    name = "evaluation/loss"
    nats = [line[name] for line in logged(tmp_path / "run") if name in line]
    assert nats[-1] < nats[0] - 0.05


def test_a_policy_needs_advantages(files, tmp_path):
    with pytest.raises(InputError, match=r"set DataSource.advantages_key"):
        opened(files, tmp_path, "Run.objective=@PolicyGradient()")
