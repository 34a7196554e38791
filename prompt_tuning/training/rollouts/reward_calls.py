"""Call rewards with a time limit, and check their results."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.number_ranges import as_number
from prompt_tuning.training.rollouts.rewards import Reward

POLL = 0.05
"""Seconds between checks of the time limit."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer to be judged.

    Attributes:
      prompt: text of the prompt.
      completion: text of the answer.
      row: record of the prompt.
      location: source of the record, for messages.
      logprob: mean log-probability of its tokens under the frozen model, in nats; None
        if no reward needs it.
    """

    prompt: str
    completion: str
    row: Mapping[str, Any]
    location: str
    logprob: float | None = None

    def __str__(self) -> str:
        return (
            f"the answer {shown(self.completion)} to {shown(self.prompt)} "
            f"({self.location})"
        )


class RewardCalls:
    """Applies rewards to answers in a thread of this process.

    Args:
      rewards: the rewards.
      seconds: time limit per call.
    """

    def __init__(self, rewards: Sequence[Reward], seconds: float | int):
        self._rewards, self._seconds = rewards, seconds

    def __call__(self, answers: Sequence[Answer]) -> Float64[np.ndarray, "R k"]:
        """Returns the `k` rewards of each answer.

        Raises:
          InputError: naming the answer, if a reward raises an exception, returns
            anything but a finite number, or takes too long.
        """
        judging = _Judging(self._rewards, answers)
        # If a reward hangs, its thread does not keep the process from ending.
        thread = threading.Thread(target=judging.run, name="rewards", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL)
            number, reward, began = judging.call
            if thread.is_alive() and time.monotonic() - began > self._seconds:
                raise InputError(
                    f"the reward {reward} took more than {self._seconds:g} s for "
                    f"{answers[number]}: make it faster, or set "
                    "Rollouts.reward_seconds to more"
                )
        if judging.problem is not None:
            raise judging.problem
        return judging.values


class _Judging:
    """One pass over some answers.

    Attributes:
      values: rewards of each answer.
      call: number of the answer, name of the reward, and start of the present call.
      problem: error that ended the pass; None without one.
    """

    def __init__(self, rewards: Sequence[Reward], answers: Sequence[Answer]):
        self._rewards, self._answers = rewards, answers
        self.values = np.zeros((len(answers), len(rewards)))
        self.call = (0, rewards[0].name, time.monotonic())
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Calls every reward for every answer, until the first problem."""
        try:
            for number, answer in enumerate(self._answers):
                for k, reward in enumerate(self._rewards):
                    self.call = (number, reward.name, time.monotonic())
                    self.values[number, k] = _judge(reward, answer)
        except BaseException as problem:  # it is raised in the thread that waits
            self.problem = problem


def _judge(reward: Reward, answer: Answer) -> float:
    """Returns a reward of an answer."""
    if reward.function is None:
        assert answer.logprob is not None
        return answer.logprob
    try:
        value = reward.function(answer.prompt, answer.completion, dict(answer.row))
    except Exception as problem:
        raise InputError(
            f"the reward {reward.name} raised {type(problem).__name__}: {problem}; for "
            f"{answer}"
        ) from problem
    number = float(value) if isinstance(value, bool) else as_number(value)
    if number is None or not np.isfinite(number):
        kind = "" if number is not None else f", {kind_of(value)}"
        raise InputError(
            f"the reward {reward.name} is {shown(value)}{kind}, expected a finite "
            f"number, for {answer}"
        )
    return float(number)
