"""The batches of a run that learns from its own answers."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, PlannedBatch
from prompt_tuning.data.batching.batches import (
    build_batch,
    share_prompts,
    split_micro_batches,
)
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.training.rollouts.answer_groups import (
    Group,
    Rollout,
    equal_groups,
    group_advantages,
)
from prompt_tuning.training.rollouts.answer_sampler import (
    AnswerSampler,
    Draws,
    SampledAnswer,
)
from prompt_tuning.training.rollouts.best_answers import BestAnswer, BestAnswers
from prompt_tuning.training.rollouts.frozen_scores import FrozenScores
from prompt_tuning.training.rollouts.prompt_order import Place, PromptOrder
from prompt_tuning.training.rollouts.prompt_table import RolloutPrompt, RolloutPrompts
from prompt_tuning.training.rollouts.reward_calls import Answer, RewardCalls
from prompt_tuning.training.rollouts.rollout_log import RolloutLog

SHORTEST_ROW = 32
"""Answers are padded to this length, its doubles, or the maximum, to compile little."""

Metrics = dict[str, float]


class RolloutStream:
    """Samples, judges and logs the answers of one step after another.

    A rollout depends only on the step's parameters, its number, the seed and the logged
    answers of earlier rollouts, so a run that was killed samples the same answers
    again.

    Args:
      model: the model in training.
      draws: the sampler, which members of a sweep share.
      prompts: the prompts.
      plan: order of the prompts.
      directory: run directory.
      done: number of completed steps.
      seed: seed of the run.

    Raises:
      InputError: if logged answers are needed but missing.
    """

    def __init__(
        self,
        model: PromptedModel,
        draws: Draws,
        prompts: RolloutPrompts,
        plan: BatchPlan,
        directory: Path,
        done: int,
        seed: int,
    ):
        self._model, self._prompts, self._plan = model, prompts, plan
        self._settings = settings = prompts.rollouts
        self._sampler = AnswerSampler(model, draws, settings, seed)
        self._judge = RewardCalls(prompts.rewards, settings.reward_seconds)
        self._frozen_scores = None
        if any(reward.is_logprob for reward in prompts.rewards):
            self._frozen_scores = FrozenScores(model)
        self._order = PromptOrder(plan, done // settings.updates)
        self._best = BestAnswers(model.config.vocabulary_size, len(prompts.rewards))
        depends = done and (settings.resample or settings.replay)
        last = done + 1 - settings.updates if depends else None
        self.log = RolloutLog(directory, done, self._resume, last)
        self._last: Rollout | None = None
        self._batch: Batch | None = None

    def _resume(self, line: JsonObject) -> None:
        """Continues after a logged answer."""
        self._order.resume(line)
        self._best.resume(line)

    def batch(self, parameters: Parameters, done: int) -> tuple[Batch, Metrics]:
        """Returns the batch after `done` steps and the rollout's metrics.

        Raises:
          InputError: if a reward cannot be used.
        """
        number, again = divmod(done, self._settings.updates)
        if not again or self._batch is None or self._last is None:
            self._last = self._roll_out(parameters, number)
            self._record(self._last, done + 1)
            self._batch = self._build(self._last)
        return self._batch, self._metrics(self._last)

    def between(self, done: int) -> bool:
        """Whether the next step starts with new answers."""
        return done % self._settings.updates == 0

    @property
    def reason(self) -> str | None:
        """The reason for stopping before the last step; None to continue."""
        limit = self._settings.equal_steps
        if not limit or self.log.equal < limit:
            return None
        reason = (
            f"in the last {self.log.equal} rollouts all answers to each prompt had the "
            "same reward, so there is nothing to learn"
        )
        if self._last is not None:
            group = self._last.groups[0]
            reason += (
                f"; for example {shown(group.answers[0].text)} to "
                f"{shown(group.prompt.text)} has the reward {group.totals[0]:g}"
            )
        return f"{reason} (Rollouts.equal_steps)"

    def _roll_out(self, parameters: Parameters, number: int) -> Rollout:
        """Samples and judges the answers of a step.

        Groups with equal rewards are replaced up to `Rollouts.resample` times.
        """
        places, planned = self._order.batch()
        groups, seconds = self._sample(places, planned, parameters, number)
        learned = list(range(len(groups)))
        for sampling in range(1, self._settings.resample + 1):
            equal = [n for n, group in enumerate(learned) if groups[group].equal]
            if not equal:
                break
            places, length = self._order.further(len(equal), sampling)
            length = max(planned.input_length, length)
            planned = dataclasses.replace(planned, input_length=length)
            found, time_taken = self._sample(places, planned, parameters, number)
            seconds += time_taken
            useful = [n for n, group in enumerate(found) if not group.equal]
            for place, n in zip(equal, useful, strict=False):
                learned[place] = len(groups) + n
            groups += found
        totals = np.stack([groups[n].learned_totals for n in learned])
        advantages = np.zeros(totals.shape)
        if self._prompts.rewards:
            advantages = group_advantages(totals, self._settings.advantage)
        return Rollout(planned, groups, learned, advantages, seconds)

    def _sample(
        self,
        places: Sequence[Place],
        planned: PlannedBatch,
        parameters: Parameters,
        number: int,
    ) -> tuple[list[Group], float]:
        """Samples and judges a group of answers to each prompt."""
        prompts = [self._prompts.prompts[place.prompt] for place in places]
        began = time.monotonic()
        sampling = places[0].sampling
        answers = self._sampler(prompts, parameters, number, sampling)
        seconds = time.monotonic() - began
        rewards = self._rewards(planned, prompts, answers, parameters)
        weights = np.ones(rewards.shape[-1])
        if self._settings.weights is not None:
            weights = np.array([float(weight) for weight in self._settings.weights])
        parts = (places, prompts, answers, rewards, rewards @ weights)
        groups = list(itertools.starmap(Group, zip(*parts, strict=True)))
        if self._settings.replay:
            step = number * self._settings.updates + 1
            groups = [self._with_best(group, step) for group in groups]
        return groups, seconds

    def _with_best(self, group: Group, step: int) -> Group:
        """Replays the best earlier answer, and keeps a better new one."""
        prompt, k = group.place.prompt, int(group.totals.argmax())
        total = float(group.totals[k])
        if group.equal:
            replayed = self._best.better(prompt, total)
            group = dataclasses.replace(group, replayed=replayed)
        found = BestAnswer(group.answers[k], group.rewards[k], total, step)
        if self._best.keep(prompt, found):
            group = dataclasses.replace(group, best=k)
        return group

    def _rewards(
        self,
        planned: PlannedBatch,
        prompts: Sequence[RolloutPrompt],
        answers: Sequence[Sequence[SampledAnswer]],
        parameters: Parameters,
    ) -> Float64[np.ndarray, "P G k"]:
        """Returns the rewards of answers; `k` is 0 without rewards."""
        count, group = len(prompts), self._settings.group
        if not self._prompts.rewards:
            return np.zeros((count, group, 0))
        logprobs: list[Any] = [None] * (count * group)
        if self._frozen_scores is not None:
            examples = [
                self._prompts.answered(prompt, answer.ids, answer.logprobs, 0.0)
                for prompt, sampled in zip(prompts, answers, strict=True)
                for answer in sampled
            ]
            rows = np.full(len(planned.rows) * group, FILLING)
            rows[: len(examples)] = np.arange(len(examples))
            batch = self._pad(planned, examples, rows)
            logprobs = self._frozen_scores(parameters, batch)[: len(examples)].tolist()
        sampled = itertools.chain.from_iterable(answers)
        asked = [prompt for prompt in prompts for _ in range(group)]
        judged = [
            Answer(prompt.text, answer.text, prompt.row, prompt.location, logprob)
            for prompt, answer, logprob in zip(asked, sampled, logprobs, strict=True)
        ]
        return self._judge(judged).reshape(count, group, -1)

    def _record(self, rollout: Rollout, step: int) -> None:
        """Logs the answers."""
        names = [reward.name for reward in self._prompts.rewards]
        advantages = dict(zip(rollout.learned, rollout.advantages, strict=True))
        lines = []
        for n, group in enumerate(rollout.groups):
            group_advantages = advantages.get(n, np.zeros(len(group.answers)))
            fields = group.place.fields if self._settings.resample else {}
            lines += [
                line | fields for line in group.lines(step, group_advantages, names)
            ]
        equal = bool(names) and not rollout.advantages.any()
        self.log.write(lines, equal=equal)

    def _metrics(self, rollout: Rollout) -> Metrics:
        """Returns metrics over all sampled answers, learned or not."""
        answers = [answer for group in rollout.groups for answer in group.answers]
        tokens = sum(len(answer.ids) for answer in answers)
        logprobs = sum(sum(answer.logprobs) for answer in answers)
        metrics = {
            "answer_tokens": tokens / len(answers),
            # The mean negative log-probability of sampled tokens estimates the entropy.
            "entropy": -logprobs / tokens,
            "truncated_share": sum(x.truncated for x in answers) / len(answers),
            "sampled_per_second": tokens / max(rollout.seconds, 1e-9),
        }
        if not self._prompts.rewards:
            return metrics
        totals = np.stack([group.totals for group in rollout.groups])
        metrics["reward"] = float(totals.mean())
        metrics["equal_share"] = float(equal_groups(totals).mean())
        if self._settings.resample:
            metrics["sampled_groups"] = float(len(totals))
        if self._settings.replay:
            replayed = (rollout.groups[n].replayed for n in rollout.learned)
            metrics["replayed"] = float(sum(x is not None for x in replayed))
        if len(self._prompts.rewards) > 1:
            means = np.stack([group.rewards for group in rollout.groups]).mean((0, 1))
            for reward, mean in zip(self._prompts.rewards, means, strict=True):
                metrics[f"reward/{reward.name}"] = float(mean)
        return metrics

    def _build(self, rollout: Rollout) -> Batch:
        """Returns the rows to learn from."""
        planned, masked = rollout.planned, self._settings.mask_truncated
        examples = [
            self._prompts.answered(
                rollout.groups[n].prompt,
                answer.ids,
                answer.logprobs,
                float(advantage),
                learned=not (masked and answer.truncated),
            )
            for n, of_group in zip(rollout.learned, rollout.advantages, strict=True)
            for answer, advantage in zip(
                rollout.groups[n].learned, of_group, strict=True
            )
        ]
        rows = np.full((len(planned.rows), self._settings.group), FILLING)
        order = np.arange(len(examples)).reshape(-1, self._settings.group)
        rows[planned.rows != FILLING] = order
        batch = self._pad(planned, examples, rows.reshape(-1))
        if self._plan.accumulate == 1:
            return batch
        return split_micro_batches(batch, self._plan.accumulate)

    def _pad(
        self, planned: PlannedBatch, examples: Sequence[Example], rows: np.ndarray
    ) -> Batch:
        """Returns rows padded to one of few lengths."""
        longest = max(
            len(example.targets) - example.prefix_length for example in examples
        )
        maximum, length = self._settings.new_tokens, SHORTEST_ROW
        while length < longest:
            length *= 2
        length = min(length, maximum)
        inputs = planned.input_length
        if planned.same_tokens:
            inputs -= maximum - length
        shape = PlannedBatch(
            rows,
            inputs,
            inputs if planned.same_tokens else length,
            length,
            same_tokens=planned.same_tokens,
        )
        pad_id = self._model.config.pad_id
        batch = build_batch(examples, shape, pad_id, columns=self._prompts.columns)
        if self._prompts.shares_prompt:
            return share_prompts(batch, self._settings.group)
        return batch
