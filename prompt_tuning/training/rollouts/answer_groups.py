"""Groups of answers to one prompt, with their rewards and advantages.

An advantage is how much better an answer is than other answers to the same prompt.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from prompt_tuning.data.batching.batch_plan import PlannedBatch
from prompt_tuning.settings.rollout_settings import Advantage
from prompt_tuning.training.rollouts.answer_sampler import SampledAnswer
from prompt_tuning.training.rollouts.best_answers import BEST, BestAnswer
from prompt_tuning.training.rollouts.prompt_order import Place
from prompt_tuning.training.rollouts.prompt_table import RolloutPrompt

SMALLEST_DEVIATION = 1e-4
"""Added to a group's standard deviation, as in TRL, to avoid division by 0."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Answers to one prompt.

    Attributes:
      place: the prompt's place in the order of the run.
      prompt: the prompt.
      answers: the `G` sampled answers.
      rewards: the `k` rewards of each answer, `[G, k]`; empty without rewards.
      totals: their weighted sums, `[G]`; 0 without rewards.
      best: index of the answer that is the best to its prompt so far; None if an
        earlier one is, or none is kept.
      replayed: earlier answer that replaces the last one in learning; None for none.
    """

    place: Place
    prompt: RolloutPrompt
    answers: Sequence[SampledAnswer]
    rewards: np.ndarray
    totals: np.ndarray
    best: int | None = None
    replayed: BestAnswer | None = None

    @property
    def learned(self) -> Sequence[SampledAnswer]:
        """The `G` answers to learn from."""
        if self.replayed is None:
            return self.answers
        return [*self.answers[:-1], self.replayed.answer]

    @property
    def learned_totals(self) -> np.ndarray:
        """Rewards of the answers to learn from, `[G]`."""
        if self.replayed is None:
            return self.totals
        return np.append(self.totals[:-1], self.replayed.total)

    @property
    def equal(self) -> bool:
        """Whether all answers to learn from have the same reward."""
        return bool(equal_groups(self.learned_totals[None])[0])

    def lines(
        self, step: int, advantages: Float64[np.ndarray, "G"], names: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yields the log fields of each sampled answer, then of a replayed one.

        Args:
          step: step that learns from them.
          advantages: advantages of the answers to learn from; 0 for a group that is
            left out.
          names: names of the rewards.
        """
        answers = list(zip(self.answers, self.rewards, self.totals, strict=True))
        if self.replayed is not None:
            # The answer that it replaces is not learned.
            advantages = np.insert(advantages, -1, 0)
            answers.append(
                (self.replayed.answer, self.replayed.rewards, self.replayed.total)
            )
        for k, (answer, rewards, total) in enumerate(answers):
            line: dict[str, Any] = {"step": step, "prompt": self.prompt.text}
            line["completion"] = answer.text
            if names:
                line |= {"reward": float(total), "advantage": float(advantages[k])}
            line |= {"tokens": len(answer.ids), "truncated": answer.truncated}
            if len(names) > 1:
                line["rewards"] = dict(zip(names, rewards.tolist(), strict=True))
            if k == self.best:
                found = BestAnswer(answer, rewards, float(total), step)
                line[BEST] = found.fields(self.place.prompt)
            elif k == len(self.answers) and self.replayed is not None:
                line["replayed"] = self.replayed.step
            yield line


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Answers to the prompts of a step.

    Attributes:
      planned: the planned batch, with the length of the prompts.
      groups: all sampled groups.
      learned: indices of the `P` groups to learn from.
      advantages: advantages of their answers, `[P, G]`.
      seconds: time that sampling took.
    """

    planned: PlannedBatch
    groups: Sequence[Group]
    learned: Sequence[int]
    advantages: np.ndarray
    seconds: float


def group_advantages(
    rewards: Float64[np.ndarray, "P G"], kind: Advantage
) -> Float64[np.ndarray, "P G"]:
    """Computes the advantage of each answer in its group.

    Args:
      rewards: rewards of the `G` answers to each of `P` prompts, at least 2.
      kind: "deviation" subtracts the group's mean and divides by its standard deviation
        (GRPO, Shao et al. 2024, section 4.1.2; unbiased, plus 1e-4, as in TRL);
        "mean" only subtracts (Dr. GRPO, Liu et al. 2025, section 3.2); "leave_one_out"
        subtracts the mean of the other answers (RLOO, Ahmadian et al. 2024,
        equation 8); "batch" subtracts the mean of all answers in the batch and divides
        by their standard deviation, plus 1e-4 (REINFORCE++, Hu 2025).
    """
    if kind == "batch":
        if (rewards == rewards[0, 0]).all():
            return np.zeros_like(rewards)
        deviation = rewards.std(ddof=1) + SMALLEST_DEVIATION
        return (rewards - rewards.mean()) / deviation
    size = rewards.shape[1]
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    # The mean of equal numbers may differ from them by rounding.
    advantages[equal_groups(rewards)] = 0
    if kind == "leave_one_out":
        # r - (S - r) / (G - 1) = G / (G - 1) (r - S / G)
        return advantages * (size / (size - 1))
    if kind == "deviation":
        deviation = rewards.std(axis=1, ddof=1, keepdims=True)
        return advantages / (deviation + SMALLEST_DEVIATION)
    return advantages


def equal_groups(rewards: Float64[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Marks groups with equal rewards, which teach nothing."""
    return (rewards == rewards[:, :1]).all(axis=1)
