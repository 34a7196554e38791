"""Runs that learn from rewards of their own answers."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.losses.grpo import SAMPLER_LOGPROBS, GroupPolicy
from prompt_tuning.losses.objective import Objective
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.training.batch_sources import RolloutBatches
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.rollouts.answer_sampler import AnswerSampler
from prompt_tuning.training.rollouts.prompt_table import RolloutPrompts
from prompt_tuning.training.rollouts.rollout_log import ROLLOUTS_FILE
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.throughput import Meter
from tests.support.exhaustive import sample
from tests.support.small_runs import Killed, logged, trained_prompt

SETTINGS = {
    "Run.objective": "@GRPO()",
    "Run.rollouts": "@Rollouts()",
    "Run.evaluation": None,
    "BATCH_SIZE": 4,
}


SOFT, LORA = pt.SoftPrompt(length=3), pt.LoRA(rank=2)


def even(prompt: str, completion: str, row) -> float:
    """A reward that random answers differ in."""
    return float(sum(map(ord, completion)) % 2)


def reinforce(files, directory, steps: int = 6, rewards=(even,), **settings):
    """Trains a tiny model for some steps."""
    rollouts = {"group": 4, "new_tokens": 8, **settings.pop("rollouts", {})}
    return pt.tune(
        str(settings.pop("model", files.decoder)),
        settings.pop("method", pt.SoftPrompt(length=3)),
        str(files.train),
        objective=settings.pop("objective", pt.GRPO()),
        rollouts=pt.Rollouts(rewards=list(rewards), **rollouts),
        directory=directory,
        steps=steps,
        save_every=2,
        log_every=1,
        batch_size=4,
        buckets=1,
        progress=False,
        **settings,
    )


def answers_of(directory) -> list[dict]:
    """Returns the answers that a run recorded."""
    lines = (directory / ROLLOUTS_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


def open_trainer(files, directory, model, method, temperature=1.0, **run):
    """Opens a run whose trained parameters are not at their start."""
    adapted = {"prompt": method.build()} if method.name == "SoftPrompt" else {}
    if not adapted:
        adapted = {"adapters": [method.build()]}
    settings = pt.Run(
        directory=str(directory),
        model=pt.Pretrained(checkpoint=str(model)).build(),
        groups=[pt.ParameterGroup([".*/(prompt|adapters)/.*"], pt.adamw(0.01)).build()],
        data=pt.DataSource(files=str(files.train), batch_size=4, buckets=1).build(),
        objective=pt.GRPO(**run.pop("objective", {})).build(),
        rollouts=pt.Rollouts(
            rewards=[even], group=4, new_tokens=8, temperature=temperature
        ).build(),
        steps=2,
        **adapted,
        **run,
    )
    trainer = pt.open_run(settings)
    keys = iter(jax.random.split(jax.random.key(5), len(trainer.start.trained)))
    moved = {
        path: leaf + 0.2 * jax.random.normal(next(keys), leaf.shape)
        for path, leaf in trainer.start.trained.items()
    }
    start = dataclasses.replace(trainer.start, trained=moved)
    directory.mkdir(exist_ok=True)
    return dataclasses.replace(trainer, start=start)


def first_batch(trainer):
    """Samples the batch of the first step."""
    source = RolloutBatches([trainer], [Meter()], 0)
    batch, _ = source.next([trainer.start], 0)
    source.close()
    return jax.device_put(batch.whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "temperature"),
    sample(
        4,
        [
            ("decoder", SOFT, 1.0),
            ("decoder", LORA, 0.6),
            ("t5", SOFT, 0.6),
            ("t5", LORA, 1.0),
            ("decoder", SOFT, 0.6),
            ("decoder", LORA, 1.0),
            ("t5", SOFT, 1.0),
            ("t5", LORA, 0.6),
        ],
    ),
    ids=repr,
)
def test_sampler_and_trainer_agree_on_probabilities(
    files, tmp_path, family, method, temperature
):
    model = getattr(files, family)
    trainer = open_trainer(files, tmp_path / "run", model, method, temperature)
    batch = first_batch(trainer)
    plan = plan_run(trainer.run)
    objective: Objective = plan.objective(trainer.examples)
    assert isinstance(objective, GroupPolicy)
    parameters = trainer.parameters(trainer.start.trained)

    @jax.jit
    def compute(parameters, batch):
        opened = merge_model(trainer.model.graph, parameters)
        head = opened.output_head()
        return objective._token_losses(opened.hidden(batch), head, batch).nll

    nll = compute(parameters, batch)
    mask = batch.loss_weights > 0
    differences = (-nll - batch.columns[SAMPLER_LOGPROBS])[mask]
    assert mask.sum() > 30
    # The ratio of the first update is 1.
    np.testing.assert_allclose(np.exp(differences), 1, atol=1e-5)


@pytest.mark.slow
def test_micro_batches_have_the_gradient_of_the_whole_batch(files, tmp_path):
    found = {}
    for parts, rows in ((1, 4), (2, 2)):
        trainer = open_trainer(
            files,
            tmp_path / f"run{parts}",
            files.decoder,
            pt.SoftPrompt(length=3),
            accumulate=parts,
            objective={"beta": 0.1, "average": "sequence"},
        )
        if parts == 2:
            assert trainer.run.data is not None
            run = dataclasses.replace(
                trainer.run, data=dataclasses.replace(trainer.run.data, batch_size=2)
            )
            plan = plan_run(run)
            trainer = dataclasses.replace(
                trainer, run=run, batch_plan=plan.batch_plan(trainer.examples)
            )
        batch = first_batch(trainer)
        objective = plan_run(trainer.run).objective(trainer.examples)
        given = {"key": None, "objective": objective}
        compute = jax.jit(functools.partial(gradients, trainer.model.graph, **given))
        found[rows] = compute(trainer.start.trained, trainer.frozen, batch)
    (whole, sums), (parted, other) = found[4], found[2]
    for path, leaf in whole.items():
        np.testing.assert_allclose(parted[path], leaf, rtol=1e-4, atol=1e-6)
    assert sums.measured.keys() == {"kl", "clipped_share"}
    np.testing.assert_allclose(other.measured["kl"], sums.measured["kl"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_a_killed_run_ends_with_the_same_bits(files, tmp_path, monkeypatch, updates):
    settings: dict[str, Any] = {"rollouts": {"updates": updates}}
    reinforce(files, tmp_path / "whole", **settings)
    expected = trained_prompt(tmp_path / "whole", 6)
    draw = AnswerSampler.__call__

    def kill(self, prompts, parameters, number, *rest):
        answers = draw(self, prompts, parameters, number, *rest)
        if number * updates == 4:
            raise Killed
        return answers

    monkeypatch.setattr(AnswerSampler, "__call__", kill)
    with pytest.raises(Killed):
        reinforce(files, tmp_path / "killed", **settings)
    monkeypatch.undo()
    # A kill may also come after the answers of a later step were written.
    with (tmp_path / "killed" / ROLLOUTS_FILE).open("a") as file:
        file.write('{"step": 5, "advantage": 1.0, "prompt": "late"}\n{"step": 5, "pro')
    reinforce(files, tmp_path / "killed", **settings)
    assert trained_prompt(tmp_path / "killed", 6) == expected
    assert answers_of(tmp_path / "killed") == answers_of(tmp_path / "whole")
    assert len(answers_of(tmp_path / "whole")) == 6 // updates * 16


def test_answers_and_metrics_are_recorded(files, tmp_path):
    reinforce(
        files,
        tmp_path / "run",
        rewards=[even, "length=3"],
        rollouts={"weights": [2, 1]},
        objective=pt.GRPO(beta=0.1),
    )
    answers = answers_of(tmp_path / "run")
    assert {answer["step"] for answer in answers} == {1, 2, 3, 4, 5, 6}
    for answer in answers:
        parts = answer["rewards"]
        assert parts["even"] == even("", answer["completion"], {})
        assert answer["reward"] == 2 * parts["even"] + parts["length=3"]
    steps = [line for line in logged(tmp_path / "run") if "reward" in line]
    rewards = [answer["reward"] for answer in answers if answer["step"] == 1]
    assert steps[0]["reward"] == pytest.approx(np.mean(rewards))
    assert steps[0]["kl"] > 0
    assert steps[0]["clipped_share"] == 0
    # Of several answers to a prompt, some draw differently.
    first = [x["completion"] for x in answers[:4]]
    assert len(set(first)) > 1


def test_a_run_without_differences_stops_with_the_reason(files, tmp_path):
    settings: dict[str, Any] = {
        "rewards": [lambda *_: 0.25],
        "rollouts": {"equal_steps": 3},
    }
    for _ in range(2):  # started again, it does not continue
        tuned = reinforce(files, tmp_path / "run", **settings)
        assert tuned.result is not None and tuned.result.reason is not None
        assert tuned.result.step == 3
        assert "same reward, so there is nothing to learn" in tuned.result.reason
    assert (tmp_path / "run" / "stopped.json").exists()


def test_a_run_without_differences_stops_between_rollouts(files, tmp_path):
    settings: dict[str, Any] = {
        "rewards": [lambda *_: 0.25],
        "rollouts": {"equal_steps": 1, "updates": 2},
    }
    tuned = reinforce(files, tmp_path / "run", **settings)
    assert tuned.result is not None and tuned.result.step == 2


def test_truncated_answers_are_masked_on_request(files, tmp_path):
    trainer = open_trainer(files, tmp_path / "run", files.decoder, pt.LoRA(rank=2))
    whole = first_batch(trainer)
    prompts = trainer.examples
    assert isinstance(prompts, RolloutPrompts)
    prompts.rollouts = dataclasses.replace(prompts.rollouts, mask_truncated=True)
    masked = first_batch(trainer)
    cut = (whole.loss_weights.sum(1) == 8) & ~masked.loss_weights.any(1)
    assert cut.any()
    np.testing.assert_array_equal(masked.loss_weights[~cut], whole.loss_weights[~cut])


def often_equal(prompt: str, completion: str, row) -> float:
    """A reward in which answers to every other prompt do not differ."""
    return even(prompt, completion, row) if len(prompt) % 2 else 0.5


def sampled_groups(answers: list[dict]) -> dict[tuple[int, ...], list[dict]]:
    """Returns the answers of each group by step, batch and position."""
    groups: dict[tuple[int, ...], list[dict]] = {}
    for answer in answers:
        place = tuple(answer[name] for name in ("step", "batch", "position"))
        groups.setdefault(place, []).append(answer)
    return groups


def test_groups_without_variance_are_replaced_by_further_prompts(files, tmp_path):
    settings: dict[str, Any] = {"rewards": [often_equal], "rollouts": {"resample": 30}}
    reinforce(files, tmp_path / "run", **settings)
    answers = answers_of(tmp_path / "run")
    groups = sampled_groups(answers)
    useful = [x for x in groups.values() if len({y["reward"] for y in x}) > 1]
    learned = [x for x in groups.values() if any(y["advantage"] for y in x)]
    assert {len(group) for group in groups.values()} == {4}
    # Four groups of each step are learned, and all of them differ in their rewards.
    steps = [group[0]["step"] for group in learned]
    assert steps == [step for step in range(1, 7) for _ in range(4)]
    assert len(useful) >= len(learned)
    # No prompt comes twice before each of the 32 has come.
    places = list(dict.fromkeys(place[1:] for place in groups))
    assert len(places) == len(groups)
    order = [group[0]["prompt"] for _, group in sorted(groups.items(), key=epochs)]
    assert len(groups) > 32
    assert len(set(order[:32])) == 32
    lines = [line for line in logged(tmp_path / "run") if "reward" in line]
    for line in lines:
        own = [x for x in answers if x["step"] == line["step"]]
        # As in DAPO, metrics are of all that was sampled.
        assert line["sampled_groups"] == len(own) / 4
        assert line["reward"] == pytest.approx(np.mean([x["reward"] for x in own]))


def epochs(group) -> tuple[int, int]:
    """Returns the place of a group in the plan."""
    (_, batch, position), _ = group
    return batch, position


def test_a_run_without_differences_stops_with_dynamic_sampling(files, tmp_path):
    rewards = [lambda *_: 0.25]
    for _ in range(2):
        tuned = reinforce(
            files,
            tmp_path / "run",
            rewards=rewards,
            rollouts={"equal_steps": 3, "resample": 2},
        )
        assert tuned.result is not None and tuned.result.step == 3
        assert "nothing to learn" in str(tuned.result.reason)
    # Each step sampled its four prompts, and four others twice.
    assert len(sampled_groups(answers_of(tmp_path / "run"))) == 3 * 4 * 3


def reinforce_dynamically(files, directory):
    rollouts = {"resample": 2, "replay": True, "weights": [1, 0]}
    reinforce(files, directory, rewards=[often_equal, "logprob"], rollouts=rollouts)
    return directory


@pytest.fixture(scope="module")
def dynamic_run(files, tmp_path_factory):
    """The directory of a run with dynamic sampling that nothing interrupts."""
    return reinforce_dynamically(files, tmp_path_factory.mktemp("dynamic") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [0, 1])
def test_a_run_killed_in_dynamic_sampling_ends_with_the_same_bits(
    files, dynamic_run, tmp_path, monkeypatch, sampling
):
    draw = AnswerSampler.__call__

    def kill(self, prompts, parameters, number, *rest):
        answers = draw(self, prompts, parameters, number, *rest)
        if (number, *rest) == (5, sampling):
            raise Killed
        return answers

    monkeypatch.setattr(AnswerSampler, "__call__", kill)
    with pytest.raises(Killed):
        reinforce_dynamically(files, tmp_path / "killed")
    monkeypatch.undo()
    reinforce_dynamically(files, tmp_path / "killed")
    expected = trained_prompt(dynamic_run, 6)
    assert trained_prompt(tmp_path / "killed", 6) == expected
    written = (dynamic_run / ROLLOUTS_FILE).read_text()
    assert (tmp_path / "killed" / ROLLOUTS_FILE).read_text() == written


def test_the_best_earlier_answer_is_replayed_where_all_are_worse(files, tmp_path):
    seen: set[str] = set()

    def once(prompt: str, completion: str, row) -> float:
        """A reward that only the first answer to each prompt has."""
        new = prompt not in seen
        seen.add(prompt)
        return float(new)

    settings: dict[str, Any] = {"rewards": [once], "rollouts": {"replay": True}}
    reinforce(files, tmp_path / "run", 10, **settings)
    answers = answers_of(tmp_path / "run")
    replayed = [answer for answer in answers if "replayed" in answer]
    best = [answer for answer in answers if "best" in answer and answer["reward"]]
    # All 32 prompts were answered in eight steps; then eight of them again.
    assert (len(best), len(replayed)) == (32, 8)
    first = {answer["prompt"]: answer for answer in best}
    for answer in replayed:
        assert answer["completion"] == first[answer["prompt"]]["completion"]
        assert answer["replayed"] == first[answer["prompt"]]["step"] < answer["step"]
        assert answer["advantage"] > 0
    # The answer that it replaces is recorded, too.
    assert len(answers) == 10 * 16 + 8
    (tmp_path / "run" / ROLLOUTS_FILE).unlink()
    with pytest.raises(InputError, match="ends with step 0, expected 10"):
        reinforce(files, tmp_path / "run", 12, **settings)


def test_a_replayed_answer_keeps_the_probabilities_it_was_drawn_with(files, tmp_path):
    model, method = files.decoder, pt.LoRA(rank=2)
    trainer = open_trainer(files, tmp_path / "run", model, method)
    prompts = trainer.examples
    assert isinstance(prompts, RolloutPrompts)
    prompts.rollouts = dataclasses.replace(prompts.rollouts, replay=True)
    rewards = iter([1.0] + [0.0] * 1000)
    (reward,) = prompts.rewards
    reward = dataclasses.replace(reward, function=lambda *_: next(rewards))
    prompts.rewards = [reward]
    trainer = dataclasses.replace(trainer, batch_plan=OnePrompt(trainer.batch_plan))
    source = RolloutBatches([trainer], [Meter()], 0)
    first, second = (source.next([trainer.start], done)[0].whole for done in range(2))
    source.close()
    np.testing.assert_array_equal(second.targets[3], first.targets[0])
    logprobs = [batch.columns[SAMPLER_LOGPROBS] for batch in (first, second)]
    np.testing.assert_array_equal(logprobs[1][3], logprobs[0][0])
    assert not np.array_equal(logprobs[1][0], logprobs[0][0])


class OnePrompt(BatchPlan):
    """A plan that repeats its first batch."""

    def __init__(self, plan):
        vars(self).update(vars(plan))
        self._plan = plan

    def _compute_epoch(self, random):
        return self._plan._compute_epoch(random)

    def batch(self, index: int):
        """Returns the first batch."""
        del index
        return self._plan.batch(0)


def test_the_logprob_reward_is_that_of_the_sampler_before_any_step(files, tmp_path):
    # The LoRA changes nothing yet, so the policy is the frozen model.
    model, method = files.decoder, pt.LoRA(rank=2)
    run = {"rewards": ["logprob"], "method": method, "model": model}
    reinforce(files, tmp_path / "run", 1, rollouts={"replay": True}, **run)
    answers = answers_of(tmp_path / "run")
    best = [answer for answer in answers if "best" in answer]
    assert len(best) == 4
    for answer in best:
        mean = np.mean(answer["best"]["logprobs"])
        assert answer["reward"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.slow
def test_prompts_alone_are_enough(tmp_path):
    tuned = pt.reinforce(
        "bundled:skills-decoder",
        pt.SoftPrompt(length=3),
        ["apple=", "bread="],
        rewards=[even],
        new_tokens=6,
        steps=1,
        batch_size=2,
        progress=False,
    )
    assert tuned.result is not None and tuned.result.step == 1


def test_new_tokens_have_no_probability_under_the_frozen_model():
    with pytest.raises(InputError, match="has no rows for the new tokens"):
        pt.reinforce(
            "bundled:skills-decoder",
            [pt.LoRA(rank=2), pt.TrainedTokens(tokens=["<new>"])],
            ["apple=", "bread="],
            rewards=["logprob"],
            steps=1,
            batch_size=2,
            progress=False,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Run.rollouts": None}, "learns from sampled answers, and Run.rollouts is"),
        ({"Run.objective": None}, "does not learn from sampled answers"),
        ({"Rollouts.group": 1}, "group is 1, expected a number from 2 to 128: GRPO"),
        ({"Rollouts.rewards": []}, "rewards is empty, and GRPO learns from rewards"),
        ({"Rollouts.temperature": 0.0}, "temperature is 0"),
        ({"Rollouts.updates": 4}, "Run.steps is 6, expected a multiple"),
        ({"DataSource.packing": True}, "packing is True, which Rollouts do not"),
        ({"Rollouts.new_tokens": 60}, "the prompt has .* tokens, expected at most 0"),
        ({"DataSource.completion_key": "answer"}, "compares with the field 'answer'"),
        ({"Rollouts.weights": [1.0, 2.0]}, "has 2 numbers, expected one for each"),
    ],
)
def test_what_rollouts_cannot_use_is_refused(files, tmp_path, capsys, changes, message):
    references = {"@GRPO()", "@Rollouts()"}
    values = {**SETTINGS, "Rollouts.rewards": ["exact_match"], **changes}
    arguments = files.arguments(tmp_path / "run")
    for name, value in values.items():
        if name == "Rollouts.rewards" and values["Run.rollouts"] is None:
            continue
        text = str(value) if str(value) in references else repr(value)
        arguments.append(f"--gin.{name}={text}")
    assert main(["train", *arguments]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert re.search(message, shown), shown
    assert not (tmp_path / "run" / "config.gin").exists()


def test_a_bad_reward_ends_a_run_with_one_message(files, tmp_path):
    with pytest.raises(InputError, match="the reward broken raised ZeroDivisionError"):

        def broken(prompt, completion, row):
            return 1 / 0

        reinforce(files, tmp_path / "run", rewards=[broken])


def test_only_a_typed_reward_imports_a_module(files, tmp_path, capsys):
    arguments = files.arguments(tmp_path / "run")
    values = {**SETTINGS, "Rollouts.rewards": ["nowhere:judge"]}
    for name, value in values.items():
        text = str(value) if str(value).startswith("@") else repr(value)
        arguments.append(f"--gin.{name}={text}")
    assert main(["train", *arguments]) != 0
    assert "give --allow_gin_imports" in " ".join(capsys.readouterr().err.split())
    assert main(["train", "--allow_gin_imports", *arguments]) != 0
    assert "cannot be imported" in " ".join(capsys.readouterr().err.split())
    flat = ["--model", str(files.decoder), "--train", str(files.train)]
    flat += [
        "--loss",
        "grpo",
        "--reward",
        "nowhere:judge",
        "--out",
        str(tmp_path / "f"),
    ]
    assert main(["train", *flat]) != 0
    assert "cannot be imported" in " ".join(capsys.readouterr().err.split())
