"""The best earlier answer to each prompt, for a run that learns from it again."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.training.rollouts.answer_sampler import SampledAnswer

BEST = "best"
"""Field that marks a logged answer as the best one so far."""


@dataclasses.dataclass(frozen=True)
class BestAnswer:
    """An earlier answer.

    Attributes:
      answer: the answer, with its log-probabilities when sampled.
      rewards: its `k` rewards.
      total: their weighted sum.
      step: step that sampled it.
    """

    answer: SampledAnswer
    rewards: Float64[np.ndarray, "k"]
    total: float
    step: int

    def fields(self, prompt: int) -> Mapping[str, Any]:
        """Returns the additional log fields that `BestAnswers.resume` reads."""
        return {
            "prompt": prompt,
            "ids": list(self.answer.ids),
            "logprobs": list(self.answer.logprobs),
            "rewards": self.rewards.tolist(),
        }


class BestAnswers:
    """The best answer to each prompt so far; the newest of equally good ones."""

    def __init__(self, vocabulary_size: int, rewards: int):
        self._vocabulary_size, self._rewards = vocabulary_size, rewards
        self._by_prompt: dict[int, BestAnswer] = {}

    def resume(self, line: JsonObject) -> None:
        """Takes over an answer of an earlier rollout if it was the best so far.

        Raises:
          InputError: if its line is damaged.
        """
        if BEST not in line:
            return
        kept = line.nested(BEST)
        ids = kept.integers("ids", maximum=self._vocabulary_size - 1)
        logprobs, rewards = kept.numbers("logprobs"), kept.numbers("rewards")
        for name, numbers, count in (
            ("logprobs", logprobs, len(ids)),
            ("rewards", rewards, self._rewards),
        ):
            if len(numbers) != count:
                kept.refuse(name, f"a list of {count}")
        answer = SampledAnswer(
            tuple(ids),
            tuple(logprobs),
            line.text("completion"),
            line.flag("truncated"),
        )
        self._by_prompt[kept.integer("prompt")] = BestAnswer(
            answer,
            np.array(rewards, np.float64),
            line.number("reward"),
            line.integer("step"),
        )

    def better(self, prompt: int, total: float) -> BestAnswer | None:
        """Returns the best earlier answer to a prompt if its reward is higher."""
        best = self._by_prompt.get(prompt)
        return best if best is not None and best.total > total else None

    def keep(self, prompt: int, found: BestAnswer) -> bool:
        """Keeps an answer unless a better one is known; returns whether it does."""
        if self.better(prompt, found.total) is not None:
            return False
        self._by_prompt[prompt] = found
        return True
