"""The batches of a run that learns from its own answers."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, PlannedBatch
from prompt_tuning.data.batching.batches import build_batch, split_micro_batches
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.rollouts.advantages import equal_groups, group_advantages
from prompt_tuning.rollouts.answer_sampler import AnswerSampler, SampledAnswer
from prompt_tuning.rollouts.prompt_table import RolloutPrompt, RolloutPrompts
from prompt_tuning.rollouts.reward_calls import Answer, RewardCalls
from prompt_tuning.rollouts.rollout_log import RolloutLog

SHORTEST_ROW = 32
"""Answers are padded to so many tokens, its doubles, or the maximum: each length is
compiled."""

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """Rewards of `G` answers to each of `P` prompts.

    Attributes:
      rewards: each of the `k` rewards of each answer, `[P, G, k]`.
      totals: their weighted sums, `[P, G]`.
      advantages: advantages of the answers, `[P, G]`.
    """

    rewards: np.ndarray
    totals: np.ndarray
    advantages: np.ndarray

    @property
    def equal(self) -> bool:
        """Whether nothing is learned from them."""
        return not self.advantages.any()


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Answers to the prompts of a batch.

    Attributes:
      prompts: the `P` prompts.
      answers: `G` answers to each.
      judgement: their rewards; None without rewards.
      seconds: time that sampling took.
    """

    prompts: Sequence[RolloutPrompt]
    answers: Sequence[Sequence[SampledAnswer]]
    judgement: Judgement | None
    seconds: float


class RolloutStream:
    """Samples, judges and records the answers of one step after another.

    A rollout depends only on the parameters of its step, its number and the seed, so a
    run that was killed samples the same answers again.

    Args:
      model: the model with what is trained.
      parameters: all its parameters.
      prompts: the prompts.
      plan: order of the prompts.
      directory: run directory.
      done: number of completed steps.
      seed: seed of the run.
    """

    def __init__(
        self,
        model: PromptedModel,
        parameters: Parameters,
        prompts: RolloutPrompts,
        plan: BatchPlan,
        directory: Path,
        done: int,
        seed: int,
    ):
        self._model, self._prompts, self._plan = model, prompts, plan
        self._settings = prompts.rollouts
        rows = len(plan.batch(0).rows) * self._settings.group
        self._sampler = AnswerSampler(model, parameters, prompts, seed, rows)
        self._judge = RewardCalls(prompts.rewards, self._settings.reward_seconds)
        self.log = RolloutLog(directory, done)
        self._last: Rollout | None = None
        self._batch: Batch | None = None

    def batch(self, parameters: Parameters, done: int) -> tuple[Batch, Metrics]:
        """Returns the batch after some completed steps, and the rollout's metrics.

        Args:
          parameters: all parameters of the model after these steps.
          done: number of completed steps.

        Raises:
          InputError: if a reward cannot be used.
        """
        number, again = divmod(done, self._settings.updates)
        planned = self._plan.batch(number)
        if not again or self._batch is None or self._last is None:
            self._last = self._roll_out(planned, parameters, number)
            self._record(self._last, done + 1)
            self._batch = self._build(planned, self._last)
        return self._batch, self._metrics(self._last)

    def between(self, done: int) -> bool:
        """Returns whether the next step begins with new answers."""
        return done % self._settings.updates == 0

    @property
    def reason(self) -> str | None:
        """Why the run stops before its last step; None while it continues."""
        limit = self._settings.equal_steps
        if not limit or self.log.equal < limit:
            return None
        reason = (
            f"in the last {self.log.equal} rollouts all answers to each prompt had the "
            "same reward, so there is nothing to learn"
        )
        if self._last is not None and self._last.judgement is not None:
            reason += (
                f"; for example {shown(self._last.answers[0][0].text)} to "
                f"{shown(self._last.prompts[0].text)} has the reward "
                f"{self._last.judgement.totals[0, 0]:g}"
            )
        return f"{reason} (Rollouts.equal_steps)"

    def _roll_out(
        self, planned: PlannedBatch, parameters: Parameters, number: int
    ) -> Rollout:
        """Samples the answers to the prompts of a batch, and judges them."""
        numbers = planned.rows[planned.rows != FILLING].tolist()
        prompts = [self._prompts.prompts[n] for n in numbers]
        began = time.monotonic()
        answers = self._sampler(prompts, parameters, number)
        seconds = time.monotonic() - began
        return Rollout(prompts, answers, self._judged(prompts, answers), seconds)

    def _judged(
        self,
        prompts: Sequence[RolloutPrompt],
        answers: Sequence[Sequence[SampledAnswer]],
    ) -> Judgement | None:
        """Judges answers by the rewards, if there are some."""
        if not self._prompts.rewards:
            return None
        judged = [
            Answer(prompt.text, answer.text, prompt.row, prompt.location)
            for prompt, group in zip(prompts, answers, strict=True)
            for answer in group
        ]
        settings = self._settings
        rewards = self._judge(judged).reshape(len(prompts), settings.group, -1)
        weights = [1.0] * rewards.shape[-1]
        if settings.weights is not None:
            weights = [float(weight) for weight in settings.weights]
        totals = rewards @ np.array(weights)
        advantages = group_advantages(totals, settings.advantage)
        return Judgement(rewards, totals, advantages)

    def _record(self, rollout: Rollout, step: int) -> None:
        """Writes the answers to the file of the run."""
        names = [reward.name for reward in self._prompts.rewards]
        judgement, lines = rollout.judgement, []
        for n, (prompt, group) in enumerate(
            zip(rollout.prompts, rollout.answers, strict=True)
        ):
            for k, answer in enumerate(group):
                line = {"step": step, "prompt": prompt.text, "completion": answer.text}
                if judgement is not None:
                    line["reward"] = float(judgement.totals[n, k])
                    line["advantage"] = float(judgement.advantages[n, k])
                line |= {"tokens": len(answer.ids), "truncated": answer.truncated}
                if judgement is not None and len(names) > 1:
                    values = judgement.rewards[n, k].tolist()
                    line["rewards"] = dict(zip(names, values, strict=True))
                lines.append(line)
        self.log.write(lines, equal=judgement is not None and judgement.equal)

    def _metrics(self, rollout: Rollout) -> Metrics:
        answers = [answer for group in rollout.answers for answer in group]
        tokens = sum(len(answer.ids) for answer in answers)
        logprobs = sum(sum(answer.logprobs) for answer in answers)
        metrics = {
            "answer_tokens": tokens / len(answers),
            # The mean of minus the log-probability of what was drawn estimates it.
            "entropy": -logprobs / tokens,
            "truncated_share": sum(x.truncated for x in answers) / len(answers),
            "sampled_per_second": tokens / max(rollout.seconds, 1e-9),
        }
        judgement = rollout.judgement
        if judgement is None:
            return metrics
        metrics["reward"] = float(judgement.totals.mean())
        metrics["equal_share"] = float(equal_groups(judgement.totals).mean())
        if len(self._prompts.rewards) > 1:
            means = judgement.rewards.mean((0, 1)).tolist()
            for reward, mean in zip(self._prompts.rewards, means, strict=True):
                metrics[f"reward/{reward.name}"] = mean
        return metrics

    def _build(self, planned: PlannedBatch, rollout: Rollout) -> Batch:
        """Returns the rows of the answers, padded to one of few lengths."""
        settings, group = self._settings, self._settings.group
        advantages = np.zeros((len(rollout.prompts), group))
        if rollout.judgement is not None:
            advantages = rollout.judgement.advantages
        examples = [
            self._prompts.answered(
                prompt,
                answer.ids,
                answer.logprobs,
                float(advantage),
                learned=not (settings.mask_truncated and answer.truncated),
            )
            for prompt, answers, of_prompt in zip(
                rollout.prompts, rollout.answers, advantages, strict=True
            )
            for answer, advantage in zip(answers, of_prompt, strict=True)
        ]
        longest = max(len(x.ids) for answers in rollout.answers for x in answers)
        maximum, length = settings.new_tokens, SHORTEST_ROW
        while length < longest:
            length *= 2
        length = min(length, maximum)
        inputs = planned.input_length
        if planned.same_tokens:
            inputs -= maximum - length
        rows = np.full((len(planned.rows), group), FILLING)
        rows[planned.rows != FILLING] = np.arange(len(examples)).reshape(-1, group)
        batch = build_batch(
            examples,
            PlannedBatch(
                rows.reshape(-1),
                inputs,
                inputs if planned.same_tokens else length,
                length,
                same_tokens=planned.same_tokens,
            ),
            self._model.config.pad_id,
            columns=self._prompts.columns,
        )
        if self._plan.accumulate == 1:
            return batch
        return split_micro_batches(batch, self._plan.accumulate)
