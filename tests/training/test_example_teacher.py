"""Teachers that read a context of its own before each example."""

import dataclasses
import json
from typing import Any, cast

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.config.run import DataSource
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.losses.context_distillation import ContextDistillation, Distillation
from prompt_tuning.models.build import frozen_graph
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.training.example_teacher import ExampleTeacher
from prompt_tuning.training.objective_data import open_evaluator
from scripts import skills
from scripts.bench import hlo
from tests.support import dummies
from tests.support.small_runs import logged

SIZES = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2)]
CONTEXTS = ((5, 7, 4, 11, 9, 3), (5, 8), (5, 6, 12, 30))
OWN = [1, 0, 2, 0, 1]
MODEL = "bundled:skills-decoder"


def batch_of(config, rows, numbers):
    batch = dummies.make_batch(config, rows)
    column = np.repeat(
        np.array(numbers, np.float32)[:, None], batch.targets.shape[1], 1
    )
    column = column[:, : batch.loss_positions.shape[1]]
    batch = dataclasses.replace(batch, columns={"contexts": column})
    return jax.tree.map(jnp.asarray, batch)


def teacher_of(config, contexts=CONTEXTS, *, after_bos=True):
    return ExampleTeacher(*frozen_graph(config), contexts, after_bos, 2**30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "after_bos"),
    [
        (dummies.LLAMA, True),
        (dummies.LLAMA, False),
        (dummies.GPT2, True),
        (dataclasses.replace(dummies.LLAMA, window=4, windowed_layers=(1,)), True),
        (dummies.QWEN3_5, True),
    ],
    ids=["llama", "llama-bare", "gpt2", "windows", "recurrent"],
)
def test_each_row_is_read_after_its_own_context(config, after_bos):
    graph, frozen = dummies.unprompted(config)
    rows = dummies.random_rows(SIZES)
    if after_bos:
        rows = [([5, *given], completion) for given, completion in rows]
    longer = [
        ([*CONTEXTS[own], *given[int(after_bos) :]], completion)
        for own, (given, completion) in zip(OWN, rows, strict=True)
    ]
    whole = dummies.make_batch(config, longer)
    expected = dummies.logits(frozen, jax.tree.map(jnp.asarray, whole), graph=graph)
    teacher, batch = (
        teacher_of(config, after_bos=after_bos),
        batch_of(config, rows, OWN),
    )
    stored = teacher.read_context(frozen)
    assert stored
    real = np.array(batch.loss_weights) > 0
    for parameters in (frozen, frozen | stored):
        hidden = jax.jit(teacher.hidden)(parameters, batch)
        actual = cast(Any, merge(graph, frozen)).logits(hidden)
        np.testing.assert_allclose(actual[real], expected[real], atol=1e-5)


def test_one_context_of_all_rows_is_read_as_any_other():
    config = dummies.LLAMA
    _, frozen = dummies.unprompted(config)
    rows = [([5, *given], done) for given, done in dummies.random_rows(SIZES)]
    batch = batch_of(config, rows, [0] * len(rows))
    one, several = teacher_of(config, CONTEXTS[:1]), teacher_of(config)
    real = np.array(batch.loss_weights) > 0
    first, second = (jax.jit(x.hidden)(frozen, batch)[real] for x in (one, several))
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_contexts_that_do_not_fit_are_left_to_each_batch():
    _, frozen = dummies.unprompted(dummies.LLAMA)
    # Keys and values: 2 * 2 blocks * 2 heads * 4 numbers of 4 bytes, at 6 positions;
    # and a state of 16 numbers.
    size = 3 * (2 * 2 * 2 * 4 * 6 + 16) * 4
    for room, stored in ((size, True), (size - 1, False)):
        teacher = dataclasses.replace(teacher_of(dummies.LLAMA), cache_bytes=room)
        assert bool(teacher.read_context(frozen)) == stored


def test_rows_that_share_a_context_of_512_tokens_pay_an_eighth():
    config = dataclasses.replace(dummies.LLAMA, maximum_positions=1024)
    graph, frozen = dummies.unprompted(config)
    contexts = tuple((5, *[7 + n] * 511) for n in range(4))
    batch = batch_of(config, [([5] * 8, [6] * 8)] * 64, [n % 4 for n in range(64)])
    whole = batch_of(config, [([5] * 519, [6] * 8)] * 64, [0] * 64)
    teacher = teacher_of(config, contexts)
    stored = jax.eval_shape(teacher.read_context, frozen)

    def hidden(frozen, batch):
        return cast(Any, merge(graph, frozen)).hidden(batch)

    each, once, reading = (
        hlo.matmul_flops(jax.jit(function).lower(*arguments).compile())
        for function, *arguments in (
            (hidden, frozen, whole),
            (teacher.hidden, frozen | stored, batch),
            (hidden, frozen, jax.tree.map(lambda x: x[:4], whole)),
        )
    )
    assert 8 * (once + reading) <= each


def test_the_gradient_is_that_of_finite_differences():
    config = dummies.LLAMA
    graph, parameters = dummies.prompted(config)
    path = "decoder/prompt/prompt"
    trained, frozen = parameter_groups.partition(parameters, {path: 0})
    rows = [([5, *given], done) for given, done in dummies.random_rows(SIZES)]
    batch = batch_of(config, rows, OWN)
    objective = Distillation(teacher_of(config))

    @jax.jit
    def loss(prompt):
        sums = loss_sums(graph, frozen | {path: prompt}, batch, objective=objective)
        return sums.loss / sums.weight

    prompt = trained[path]
    direction = jax.random.normal(jax.random.key(1), prompt.shape)
    step = 1e-2
    numeric = (loss(prompt + step * direction) - loss(prompt - step * direction)) / (
        2 * step
    )
    exact = jnp.vdot(jax.grad(loss)(prompt), direction)
    np.testing.assert_allclose(exact, numeric, rtol=2e-3)


TEXTS = ["upper: ", "reverse: "]
PAIRS = [("apple=", "APPLE", 0), ("bread=", "daerb", 1), ("chair=", "CHAIR", 0)]


def write(folder, form) -> tuple[str, dict[str, Any]]:
    """Writes examples with contexts in one of the forms, and returns their settings."""
    table = folder / "contexts.jsonl"
    if form == "hdf5":
        rows = [
            [skills.BOS_ID, *skills.encode(given), *skills.encode(answer)]
            for given, answer, _ in PAIRS
        ]
        with h5py.File(folder / "rows.hdf5", "w") as file:
            file["input_ids"] = np.array(rows, np.int32)
            file["token_type_ids"] = np.array([[0] * 7 + [1] * 5] * len(rows), np.int32)
            file["chunk"] = np.array([number for *_, number in PAIRS])
        return str(folder / "rows.hdf5"), {"contexts": TEXTS}
    lines = [
        {"prompt": given, "completion": answer, "chunk": number}
        for given, answer, number in PAIRS
    ]
    if form == "texts":
        lines = [{**line, "chunk": TEXTS[line["chunk"]]} for line in lines]
    file = folder / f"{form}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if form == "texts":
        return str(file), {}
    first, second = TEXTS
    content = [{"text": first}, {"ids": skills.encode(second)}]
    table.write_text("".join(json.dumps(line) + "\n" for line in content))
    return str(file), {"contexts": str(table)}


def divergence(file, loss):
    model = pt.load(MODEL)
    data = DataSource(files=[file], add_eos=False, batch_size=4)
    evaluator = open_evaluator(loss, model.prompted, Evaluation(data=data))
    return evaluator(model.parameters)["loss"]


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Divergence of the rows of one context after the other, from its own teacher."""
    parts = []
    for number, text in enumerate(TEXTS):
        chosen = [row for row in PAIRS if row[2] == number]
        part = tmp_path_factory.mktemp("parts") / f"{number}.jsonl"
        part.write_text(
            "".join(
                json.dumps({"prompt": given, "completion": answer}) + "\n"
                for given, answer, _ in chosen
            )
        )
        one = divergence(str(part), ContextDistillation(context=text))
        parts += [one] * len(chosen)
    return np.mean(parts)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["texts", "table", "hdf5"])
def test_the_column_has_texts_or_numbers_of_a_table(tmp_path, form, apart):
    file, settings = write(tmp_path, form)
    actual = divergence(file, ContextDistillation(context_key="chunk", **settings))
    assert actual > 0.01
    np.testing.assert_allclose(actual, apart, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_run_learns_what_each_context_causes(tmp_path):
    file, settings = write(tmp_path, "table")
    tuned = pt.tune(
        MODEL,
        pt.LoRA(rank=4),
        [file],
        objective=pt.ContextDistillation(context_key="chunk", **settings),
        steps=40,
        learning_rate=0.03,
        evaluation=[file],
        progress=False,
    )
    before = divergence(file, ContextDistillation(context_key="chunk", **settings))
    assert tuned.evaluate()["loss"] < 0.5 * before


@pytest.mark.slow
def test_sampled_answers_are_judged_after_the_prompts_own_context(tmp_path):
    file, settings = write(tmp_path, "texts")
    pt.tune(
        MODEL,
        pt.SoftPrompt(length=4),
        [file],
        objective=pt.OnPolicyDistillation(context_key="chunk", **settings),
        rollouts=pt.Rollouts(group=1, new_tokens=4),
        steps=2,
        batch_size=2,
        directory=tmp_path / "run",
        progress=False,
    )
    losses = [line["loss"] for line in logged(tmp_path / "run") if "loss" in line]
    assert losses and np.isfinite(losses).all()


BEYOND = "a table with a token that the model does not have"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": "a", "context_key": "chunk"}, "give one of them"),
        ({"context": "a", "contexts": ["b"]}, "no context_key names the column"),
        ({"context_key": "chunk", "contexts": [""]}, "has no text, or an empty one"),
        ({"context_key": "chunk", "contexts": BEYOND}, "context 1 has the token 99999"),
        ({"context_key": "chunk", "contexts": ["one"]}, "line 2: 'chunk' is 1.0, exp"),
        ({"context_key": "other", "contexts": ["one"]}, "expected 'other'"),
        ({"context_key": "chunk"}, "'chunk' is 0, expected a text"),
    ],
)
def test_contexts_that_cannot_be_read_are_refused(tmp_path, given, message):
    file, _ = write(tmp_path, "table")
    if given.get("contexts") is BEYOND:
        table = tmp_path / "beyond.jsonl"
        table.write_text('{"text": "one"}\n{"ids": [5, 99999999999]}\n')
        given = {**given, "contexts": str(table)}
    with pytest.raises(InputError, match=message):
        divergence(file, ContextDistillation(**given))


def test_a_row_has_to_fit_behind_its_own_context(tmp_path):
    file = tmp_path / "rows.jsonl"
    loss = ContextDistillation(context_key="chunk", contexts=["a" * 100, "b"])
    model = pt.load(MODEL).prompted
    evaluation = Evaluation(data=DataSource(files=[str(file)], add_eos=False))

    def open_with(length, chunk):
        rows = [("c", 0), ("c" * length, chunk)]
        file.write_text(
            "".join(
                json.dumps({"prompt": "p", "completion": text, "chunk": number}) + "\n"
                for text, number in rows
            )
        )
        open_evaluator(loss, model, evaluation)

    open_with(40, 1)
    with pytest.raises(InputError, match=r"100 tokens, and with .* 14\d, but .* 128"):
        open_with(40, 0)
