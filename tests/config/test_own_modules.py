"""Objectives and prompts of a user's own module, in configs and from Python."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.losses.foreign_objective import ForeignObjective, foreign_objective
from prompt_tuning.losses.objective import LossSums
from prompt_tuning.prompts.soft import SoftPrompt
from tests.support.small_runs import clean_process, files

__all__ = ["clean_process", "files"]

MODULE = '''
import dataclasses

import gin
import jax.numpy as jnp

from prompt_tuning.losses.objective import LossSums, target_losses
from prompt_tuning.prompts.soft import SoftPrompt


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Focal:
    """Weighs each token by (1 - p) ** gamma."""

    gamma: float = 2.0

    def sums(self, hidden, head, batch, parameters=None):
        losses = target_losses(hidden, head, batch)
        focal = (1 - jnp.exp(-losses.nll)) ** self.gamma * losses.nll
        weights = batch.loss_weights
        return LossSums(
            jnp.sum(weights * focal),
            jnp.sum(weights),
            jnp.sum(weights * losses.correct),
        )

    def divisor(self, batch):
        return jnp.sum(batch.loss_weights)


@gin.configurable
class OwnPrompt(SoftPrompt):
    """A soft prompt."""
'''
CONFIG = """
include 'runs/first_prompt.gin'
import own_module_of_test
Run.objective = @Focal()
Focal.gamma = 1.5
Run.prompt = @OwnPrompt
OwnPrompt.length = 3
"""


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Twice the cross-entropy of the learned tokens."""

    factor: float = 2.0

    def sums(self, hidden, head, batch, parameters=None) -> LossSums:
        logits = jnp.einsum("bmd,vd->bmv", hidden, head)
        positions = batch.loss_positions
        targets = jnp.take_along_axis(batch.targets, positions, axis=1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        weights = batch.loss_weights
        correct = logits.argmax(-1) == targets
        total = jnp.sum(weights * losses)
        return LossSums(
            self.factor * total, jnp.sum(weights), jnp.sum(weights * correct)
        )

    def divisor(self, batch):
        return jnp.sum(batch.loss_weights)


def test_a_config_imports_an_objective_and_a_prompt(
    files, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_module_of_test.py").write_text(MODULE)
    (tmp_path / "own.gin").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = files.arguments(tmp_path / "run")[1:]
    own = [f"--gin_file={tmp_path / 'own.gin'}", "--dry_run"]
    command = ["train", *own, *arguments, "--allow_gin_imports"]
    assert main(command) == 0
    assert "(3, 16)" in capsys.readouterr().out


class Negated(SoftPrompt):
    """A soft prompt of the negative of what is trained."""

    def __call__(self, key=None):
        return -self.prompt[...]


@pytest.mark.slow
def test_a_class_of_prompts_trains_from_python(files, tmp_path, capsys):
    """Training from negative values is training of the negative prompt."""

    def constant(value):
        return lambda key, shape, vocabulary: jnp.full(shape, value)

    def tuned(prompt, value):
        return pt.tune(
            files.decoder,
            functools.partial(prompt, length=2, initializer=constant(value)),
            files.train,
            steps=1,
            optimizer=optax.sgd(0.5),
            batch_size=8,
            buckets=1,
            progress=False,
            directory=tmp_path / prompt.__name__,
        )

    plain, negated = tuned(SoftPrompt, 0.25), tuned(Negated, -0.25)
    for path, leaf in plain.trained.items():
        np.testing.assert_allclose(negated.trained[path], -leaf, rtol=1e-5, atol=1e-7)
    assert negated.generate("ab=", new_tokens=3) == plain.generate("ab=", new_tokens=3)
    # The same call finds the finished run.
    assert "step 1," in f"{tuned(Negated, -0.25)!r},"
    assert main(["generate", "--run", str(negated.directory), "ab="]) == 2
    assert "Negated(length=2" in capsys.readouterr().err
    with pytest.raises(pt.InputError, match=r"Negated cannot be made.*'length'"):
        pt.tune(files.decoder, Negated, files.train)


@pytest.mark.exhaustive
def test_an_object_with_the_methods_of_an_objective_trains(files, tmp_path):
    def tuned(objective, rate):
        settings = {"steps": 1, "batch_size": 8, "progress": False, "buckets": 1}
        return pt.tune(
            files.decoder,
            pt.SoftPrompt(length=3),
            files.train,
            objective=objective,
            optimizer=optax.sgd(rate),
            directory=tmp_path / f"{rate}",
            **settings,
        )

    # A factor of the loss is a factor of plain gradient descent's rate.
    doubled, plain = tuned(Doubled(), 0.25), tuned(None, 0.5)
    for path, leaf in plain.trained.items():
        np.testing.assert_allclose(doubled.trained[path], leaf, rtol=1e-4, atol=1e-6)
    assert isinstance(doubled.run.objective, ForeignObjective)
    config = (Path(doubled.run.directory) / "config.gin").read_text()
    assert "Doubled" in config


def test_objects_that_are_no_objectives_are_refused():
    with pytest.raises(pt.InputError, match="with the methods sums and divisor"):
        foreign_objective(object())
    with pytest.raises(pt.InputError, match="with the methods sums and divisor"):
        foreign_objective(Doubled)
    unhashable = Doubled(factor=np.ones(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(pt.InputError, match=r"frozen=True"):
        foreign_objective(unhashable)
