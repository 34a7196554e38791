"""A distillation whose teacher runs once, and is stored beside the run."""

import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prompt_tuning as pt
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batches import read_batch
from prompt_tuning.losses.cross_entropy import distillation_loss, top_targets
from prompt_tuning.losses.logit_losses import Divergence, TopTargets
from prompt_tuning.training import stored_targets
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.stored_columns import CompletedExamples, StoredColumns
from scripts import recall
from tests.support.small_runs import logged

RECALL, PREFIX = "bundled:recall", "decoder/prompt/prompt"
TEXT, ASKED = recall.document(4, 12)


def distilled(folder, steps=3, dtype="float32", **settings):
    """Trains a prefix that stands for a table; returns the run."""
    return pt.tune(
        pt.load(RECALL, compute_dtype=dtype),
        pt.KeyValuePrefix(length=6, initializer=pt.from_text(TEXT)),
        ASKED,
        objective=pt.ContextDistillation(**{"context": TEXT, **settings}),
        steps=steps,
        batch_size=4,
        learning_rate=0.02,
        directory=folder,
        log_every=1,
        progress=False,
    ).run


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Trains with the targets of a kind, and in a type, once."""

    @functools.cache
    def run(kind: str, dtype: str = "float32"):
        folder = tmp_path_factory.mktemp(kind) / "run"
        return distilled(folder, dtype=dtype, targets=kind)

    return run


@pytest.mark.slow
def test_stored_states_teach_as_the_teacher_in_the_step_does(
    known, tmp_path, monkeypatch
):
    distilled(tmp_path / "hidden", targets="hidden")
    expected, stored = (
        [line["loss"] for line in logged(Path(folder))]
        for folder in (known("exact").directory, tmp_path / "hidden")
    )
    assert expected[0] > 1
    np.testing.assert_allclose(stored, expected, rtol=0, atol=1e-6)
    # A run that goes on computes nothing again.
    monkeypatch.delattr(stored_targets, "_predict")
    distilled(tmp_path / "hidden", steps=4, targets="hidden")
    assert len(logged(tmp_path / "hidden")) == 4


def first_gradient(run):
    """Returns the gradient of the prefix in the first batch of a run."""
    trainer, plan = open_run(run), plan_run(run)
    pad_id = trainer.model.config.pad_id
    batch = read_batch(trainer.examples, trainer.batch_plan, 0, pad_id=pad_id)
    objective = plan.objective(plan.examples())
    compute = jax.jit(
        functools.partial(gradients, trainer.model.graph, objective=objective)
    )
    found, _ = compute(trainer.start.trained, trainer.inputs, batch, None)
    return np.asarray(found[PREFIX], np.float64).ravel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "dtype", "error"), [("hidden", "bfloat16", 1e-3), ("top", "float32", 1)]
)
def test_the_gradient_is_nearly_that_of_the_teacher_in_the_step(
    known, targets, dtype, error
):
    exact, stored = (first_gradient(known(kind, dtype)) for kind in ("exact", targets))
    norm = np.linalg.norm(exact)
    assert norm > 0.01
    assert np.linalg.norm(stored - exact) < error * norm
    assert stored @ exact / norm / np.linalg.norm(stored) > 0.99


def _more_counted(arrays):
    arrays["counts"][0] += 1


def _fewer_counted(arrays):
    arrays["counts"][:] = 0


def _one_of_all(arrays):  # which NumPy would give to each place
    for name in ("teacher_ids", "teacher_logprobs"):
        arrays[name] = arrays[name][:1]
        arrays[f"{name}_sizes"] = (np.arange(len(arrays["rows"])) == 0).astype(int)


def _negative_sizes(arrays):
    for name in ("counts", "teacher_ids", "teacher_logprobs"):
        arrays[f"{name}_sizes"][1:3] += [-99, 99]


def _unknown_tokens(arrays):
    arrays["teacher_ids"] += 1000


def _fractions(arrays):
    arrays["teacher_ids"] = arrays["teacher_ids"] + 0.5


DAMAGES = [_more_counted, _fewer_counted, _one_of_all, _negative_sizes]
DAMAGES += [_unknown_tokens, _fractions]


@pytest.mark.slow
def test_damaged_predictions_are_computed_again(known, tmp_path):
    run = known("top")
    file = tmp_path / stored_targets.TARGETS_FILE
    shutil.copy(Path(run.directory) / stored_targets.TARGETS_FILE, file)
    examples = open_run(run).examples
    assert isinstance(examples, CompletedExamples)
    whole = examples.stored
    expected, content = whole.read(), file.read_bytes()

    def again():
        """Returns the rows that are read, and the numbers of those computed."""
        computed = []

        def compute(numbers):
            computed.extend(numbers)
            return whole._compute(numbers)

        parts = whole.form, whole._examples, compute, file, whole._fingerprint
        return StoredColumns(*parts).read(), computed

    assert again()[1] == []
    for damage in DAMAGES:
        file.write_bytes(content)
        with np.load(file) as archive:
            arrays = dict(archive)
        damage(arrays)
        np.savez(file, **arrays)
        found, computed = again()
        assert computed, damage.__name__
        for digest, values in expected.items():
            for name, array in values.items():
                np.testing.assert_array_equal(found[digest][name], array)
    for size in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        assert again()[1]


KEYS = jax.random.split(jax.random.key(0), 3)
STUDENT, TEACHER = (2 * jax.random.normal(key, (5, 7)) for key in KEYS[:2])
HEAD = jax.random.normal(KEYS[2], (11, 7))
TARGETS = jnp.arange(5)


def test_the_fewest_tokens_with_a_mass_are_kept():
    found = top_targets(TEACHER, HEAD, 0.8, 6)
    probabilities = np.asarray(jax.nn.softmax(TEACHER @ HEAD.T))
    for row, ids, logprobs in zip(probabilities, *map(np.asarray, found), strict=True):
        kept = np.isfinite(logprobs)
        count = int(kept.sum())
        np.testing.assert_array_equal(ids[kept], np.argsort(-row)[:count])
        np.testing.assert_allclose(np.exp(logprobs[kept]), row[ids[kept]], rtol=1e-5)
        mass = np.sort(row)[::-1].cumsum()
        assert count == 6 or mass[count - 1] >= 0.8
        assert count == 1 or mass[count - 2] < 0.8


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_all_tokens_that_are_not_kept_are_one_outcome(kind):
    found = top_targets(TEACHER, HEAD, 0.8, 6)
    kept = np.zeros((5, 11), bool)
    for row, ids, logprobs in zip(kept, *map(np.asarray, found), strict=True):
        row[ids[np.isfinite(logprobs)]] = True

    def outcomes(hidden):
        probabilities = jax.nn.softmax(hidden @ HEAD.T)
        rest = jnp.where(kept, 0, probabilities).sum(-1, keepdims=True)
        both = jnp.concatenate([jnp.where(kept, probabilities, 0), rest], -1)
        return jnp.log(jnp.maximum(both, 1e-30))

    def expected(hidden):
        student, teacher = outcomes(hidden), outcomes(TEACHER)
        divergence = optax.losses.kl_divergence_with_log_targets
        if kind == "forward":
            return divergence(student, teacher).sum()
        if kind == "reverse":
            return divergence(teacher, student).sum()
        mixture = jnp.logaddexp(student, teacher) - np.log(2)
        both = divergence(mixture, teacher) + divergence(mixture, student)
        return 0.5 * both.sum()

    def actual(hidden):
        loss = distillation_loss(hidden, HEAD, TARGETS, found, Divergence(kind))
        return loss.nll.sum()

    for one, other in zip(
        *(jax.value_and_grad(function)(STUDENT) for function in (actual, expected)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_keeps_all_tokens_is_itself():
    found = TopTargets(*top_targets(TEACHER, HEAD, 1 - 1e-9, 11))
    losses = [
        distillation_loss(STUDENT, HEAD, TARGETS, teacher).nll
        for teacher in (found, TEACHER)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_answers_of_the_student_have_no_stored_targets():
    with pytest.raises(InputError, match="new in each step"):
        pt.OnPolicyDistillation(context="a", targets="top").build()
