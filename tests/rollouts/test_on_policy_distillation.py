"""Runs that distill a context on answers that the trained model writes."""

import functools
import json
import re
from typing import Any

import jax
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.parameters import merge
from prompt_tuning.training.batch_sources import RolloutBatches
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.rollouts.answer_sampler import AnswerSampler
from prompt_tuning.training.rollouts.rollout_log import ROLLOUTS_FILE
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.throughput import Meter
from scripts import skills
from tests.support import dummies
from tests.support.small_runs import Killed, logged, trained_prompt

CONTEXT = "a text"


def settings_of(files, directory, model, **objective) -> pt.Run:
    """A run of two steps from a moved prompt."""
    return pt.Run(
        directory=str(directory),
        model=pt.Pretrained(checkpoint=str(model)).build(),
        prompt=pt.SoftPrompt(length=3).build(),
        groups=[pt.ParameterGroup([".*/prompt/.*"], pt.adamw(0.01)).build()],
        data=pt.DataSource(files=str(files.train), batch_size=4, buckets=1).build(),
        objective=pt.OnPolicyDistillation(context=CONTEXT, **objective).build(),
        rollouts=pt.Rollouts(group=2, new_tokens=8).build(),
        steps=2,
    )


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder", "t5"])
def test_the_loss_is_the_divergence_at_the_models_own_tokens(files, tmp_path, family):
    run = settings_of(files, tmp_path / "run", getattr(files, family))
    trainer = pt.open_run(run)
    (tmp_path / "run").mkdir()
    source = RolloutBatches([trainer], [Meter()], 0)
    batch = jax.device_put(source.next([trainer.start], 0)[0].whole)
    source.close()
    trained = trainer.start.trained
    graph = trainer.model.graph
    objective = plan_run(run).objective(trainer.examples)
    given = {"key": None, "objective": objective}
    compute = jax.jit(functools.partial(gradients, graph, **given))
    _, sums = compute(trained, trainer.inputs, batch)

    # The frozen model reads the context and the same answers as ordinary rows.
    real = np.array(batch.loss_weights) > 0
    context, begin = skills.encode(CONTEXT), int(family == "decoder")
    rows = []
    for row, length in enumerate(real.sum(1)):
        positions = batch.loss_positions[row][:length]
        answer = np.array(batch.targets[row][positions]).tolist()
        count = int(batch.lengths[row]) - begin * length
        given = np.array(batch.tokens[row][:count]).tolist()
        rows.append(([*given[:begin], *context, *given[begin:]], answer))
    frozen = pt.load(getattr(files, family))
    longer = dummies.make_batch(frozen.config, rows)
    states = dummies.logits(frozen.parameters, longer, graph=frozen.graph)
    teacher = log_softmax(states)[np.array(longer.loss_weights) > 0]
    model: Any = merge(graph, trained | trainer.frozen)
    student = log_softmax(model.logits(model.hidden(batch)))[real]
    divergence = (np.exp(student) * (student - teacher)).sum(-1)
    assert len(divergence) > 20
    np.testing.assert_allclose(sums.loss / sums.weight, divergence.mean(), rtol=1e-4)


def distill(files, directory):
    """Runs the command for six steps; the answers to each prompt serve two of them."""
    flat = ["--model", str(files.decoder), "--train", str(files.train)]
    flat += ["--loss", "on_policy_distillation", "--context", CONTEXT]
    flat += ["--divergence", "jsd", "--beta", "0.3", "--new_tokens", "8"]
    flat += ["--updates", "2", "--steps", "6", "--batch_size", "4", "--save_every", "2"]
    return main(["train", *flat, "--out", str(directory), "--gin.Run.log_every=1"])


@pytest.mark.slow
def test_a_killed_run_of_the_command_ends_with_the_same_bits(
    files, tmp_path, monkeypatch
):
    assert distill(files, tmp_path / "whole") == 0
    sample = AnswerSampler.__call__

    def kill(self, prompts, parameters, number, *rest):
        answers = sample(self, prompts, parameters, number, *rest)
        if number == 2:
            raise Killed
        return answers

    monkeypatch.setattr(AnswerSampler, "__call__", kill)
    with pytest.raises(Killed):
        distill(files, tmp_path / "killed")
    monkeypatch.undo()
    assert distill(files, tmp_path / "killed") == 0
    expected = trained_prompt(tmp_path / "whole", 6)
    assert trained_prompt(tmp_path / "killed", 6) == expected
    answers = (tmp_path / "whole" / ROLLOUTS_FILE).read_text()
    assert (tmp_path / "killed" / ROLLOUTS_FILE).read_text() == answers
    lines = [json.loads(line) for line in answers.splitlines()]
    assert len(lines) == 3 * 4  # one answer to each prompt of three rollouts
    assert lines[0].keys() == {"step", "prompt", "completion", "tokens", "truncated"}
    steps = [line for line in logged(tmp_path / "whole") if "loss" in line]
    assert len(steps) == 6
    assert all(line["entropy"] > 0 and "reward" not in line for line in steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ["exact_match"]}, "learns from a teacher and reads no rewards"),
        ({"rollouts": None}, r"Run.rollouts is None: .*tune\(..., rollouts=Rollouts"),
        ({"beta": 0.5}, "beta is 0.5, which only the divergence 'jsd' reads"),
        ({"beta": 1.0, "divergence": "jsd"}, "beta is 1.0, expected a number above 0"),
        ({"context": ""}, "OnPolicyDistillation.context is empty"),
        ({"context": "x" * 60}, "the context has 60 tokens, and with the longest"),
        ({"packing": True}, "packing is True, which Rollouts do not support"),
    ],
)
def test_what_cannot_be_distilled_is_refused(files, tmp_path, changes, message):
    objective: dict[str, Any] = {"context": CONTEXT} | changes
    rollouts: Any = pt.Rollouts(new_tokens=8, rewards=objective.pop("rewards", []))
    rollouts = objective.pop("rollouts", rollouts)
    packing = objective.pop("packing", False)
    with pytest.raises(pt.InputError) as raised:
        pt.tune(
            str(files.decoder),
            pt.SoftPrompt(length=3),
            str(files.train),
            objective=pt.OnPolicyDistillation(**objective),
            rollouts=rollouts,
            packing=packing,
            directory=tmp_path / "run",
            steps=2,
            progress=False,
        )
    assert re.search(message, str(raised.value)), str(raised.value)
    assert not (tmp_path / "run").exists()
