"""Settings of rollouts: how answers are sampled and rewarded."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import (
    AnyNumber,
    AxisLength,
    NonnegativeInteger,
    PositiveInteger,
    PositiveNumber,
    SampleCount,
    SamplingTemperature,
)
from prompt_tuning.core.setting_hints import how_to_set

Advantage = Literal["deviation", "mean", "leave_one_out", "batch"]
RewardFunction = Callable[..., Any]
"""`(prompt, completion, row) -> reward`; `row` has all fields of the prompt's record.
"""

FROM_PYTHON = "python:"
"""Prefix of the name that stands for a Python function in the config of a run."""


NEW_TOKENS = 64
"""Default maximum number of new tokens of a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How answers are sampled during training, and how they are rewarded.

    In each step the model in training answers each prompt of a batch several times.
    With `GRPO`, rewards judge the answers, and the step learns from their differences.
    `OnPolicyDistillation` learns from a teacher instead, without rewards.

    Attributes:
      rewards: what judges an answer; rewards are added up. Each is "exact_match" or
        "numeric_answer" (compared with the record's completion), "regex=EXPRESSION" (1
        if it matches the whole answer), "json_schema=FILE" (1 if the answer is JSON
        that the file's schema allows), "length=CHARACTERS" (1 up to that length,
        falling to 0 at twice that), "logprob" (mean log-probability of the answer's
        tokens under the frozen model, in nats), a function `(prompt, completion, row)
        -> number`, or the name of a function, "module:function".
      weights: factor of each reward; None for 1.
      group: number of answers per prompt; rewards need at least 2.
      new_tokens: maximum number of tokens of an answer, its end token included.
      temperature: sampling temperature.
      stop: texts that end an answer.
      advantage: how a group's rewards become advantages: "deviation" as in GRPO, "mean"
        as in Dr. GRPO, "leave_one_out" as in RLOO, "batch" as in REINFORCE++; see
        `group_advantages`.
      mask_truncated: whether to learn nothing from answers without an end.
      updates: number of steps that learn from each answer.
      slots: maximum number of answers that are sampled in parallel.
      reward_seconds: time limit for one call of a reward.
      resample: how often a step replaces groups with equal rewards, which teach
        nothing, by groups of new prompts (dynamic sampling of DAPO, Yu et al. 2025,
        section 3.2). Groups that are still equal after that stay.
      replay: whether to replace the last answer of a group with equal rewards by the
        best earlier answer to the prompt, if its reward is higher. Its ratio is
        relative to the probabilities that it was sampled with.
      equal_steps: number of consecutive rollouts in which all groups have equal
        rewards, so that nothing is learned, after which the run stops; 0 to never stop.

    Raises:
      InputError: if a value is out of range.

    Examples:
      >>> rollouts = pt.Rollouts(rewards=["regex=[A-Z]+"], group=4, new_tokens=8)
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     objective=pt.GRPO(),
      ...     rollouts=rollouts,
      ...     steps=2,
      ...     batch_size=4,
      ...     progress=False,
      ... )
    """

    rewards: Sequence[str | RewardFunction] = ()
    weights: Sequence[AnyNumber] | None = None
    group: SampleCount = 8
    new_tokens: AxisLength = NEW_TOKENS
    temperature: SamplingTemperature = 1.0
    stop: Sequence[str] = ()
    advantage: Advantage = "deviation"
    mask_truncated: bool = False
    updates: PositiveInteger = 1
    slots: AxisLength = 64
    reward_seconds: PositiveNumber = 10.0
    resample: NonnegativeInteger = 0
    replay: bool = False
    equal_steps: NonnegativeInteger = 20

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.rewards, str):
            raise InputError(
                f"Rollouts.rewards is {shown(self.rewards)}, expected a list of "
                "rewards, such as ['exact_match']"
            )
        if self.weights is not None and len(self.weights) != len(self.rewards):
            raise InputError(
                f"Rollouts.weights has {len(self.weights)} numbers, expected one for "
                f"each of the {len(self.rewards)} rewards"
            )

    def check_rewards(self, objective: str, *, learned: bool) -> None:
        """Checks that there are rewards if and only if the objective learns from them.

        Args:
          objective: name of the objective.
          learned: whether it learns from rewards.

        Raises:
          InputError: naming what to set.
        """
        if not learned and self.rewards:
            raise InputError(
                f"Rollouts.rewards is {shown(self.described().rewards)}, but "
                f"{objective} learns from a teacher and reads no rewards: leave them "
                "out, or learn from them with GRPO"
            )
        for name in ("resample", "replay"):
            if not learned and getattr(self, name):
                raise InputError(
                    f"Rollouts.{name} is {getattr(self, name)}, but {objective} reads "
                    "no rewards, of which it depends: leave it out"
                )
        if learned and not self.rewards:
            raise InputError(
                f"Rollouts.rewards is empty, and {objective} learns from rewards: give "
                f"at least one, e.g. {how_to_set('Rollouts.rewards', ['exact_match'])}"
            )
        if learned and self.group < 2:
            raise InputError(
                f"Rollouts.group is {self.group}, expected a number from 2 to 128: "
                f"{objective} compares the answers to a prompt"
            )

    def described(self) -> "Rollouts":
        """Returns the settings as configs store them, with functions by their names."""
        return dataclasses.replace(self, rewards=list(map(reward_name, self.rewards)))


def reward_name(reward: str | RewardFunction) -> str:
    """Returns the name of a reward in a config."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    return f"{FROM_PYTHON}{name}"
