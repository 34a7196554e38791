"""Settings of rollouts: how answers are sampled, and which rewards judge them."""

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

Advantage = Literal["deviation", "mean", "leave_one_out", "batch"]
RewardFunction = Callable[..., Any]
"""`(prompt, completion, row) -> reward`, with all fields of the prompt's record."""

FROM_PYTHON = "python:"
"""Beginning of the name that stands for a function in the config of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How answers are sampled in training, and what judges them.

    In each step the model that is trained answers each prompt of a batch several times.
    With `GRPO`, rewards judge the answers, and the step learns from how they differ.
    `OnPolicyDistillation` learns from a teacher and has no rewards.

    Attributes:
      rewards: what judges an answer; the sum counts. Each is "exact_match" or
        "numeric_answer" (compared with the record's completion), "regex=EXPRESSION"
        (1 if it matches the whole answer), "json_schema=FILE" (1 if the answer is JSON
        that the schema in the file allows), "length=CHARACTERS" (1 up to that length,
        falling to 0 at twice that), "logprob" (mean log-probability of its tokens
        under the frozen model, in nats), a function `(prompt, completion, row) ->
        number`, or the name of one, "module:function".
      weights: factor of each reward; None for 1.
      group: number of answers to each prompt; rewards need at least 2.
      new_tokens: maximum number of tokens of an answer, with its end.
      temperature: temperature of the distribution that tokens are drawn from.
      stop: texts that end an answer.
      advantage: what is learned from the rewards of a group: "deviation" is GRPO's,
        "mean" Dr. GRPO's, "leave_one_out" RLOO's, "batch" REINFORCE++'s;
        see `group_advantages`.
      mask_truncated: whether nothing is learned from answers without an end.
      updates: steps that learn from each answer.
      slots: maximum number of answers that are sampled together.
      reward_seconds: maximum time of a call of a reward.
      resample: how often in a step groups of equal rewards, from which nothing is
        learned, are replaced by those of further prompts (dynamic sampling of DAPO, Yu
        et al. 2025, section 3.2). Those that are left then stay.
      replay: whether in a group of equal rewards the last answer is replaced by the
        best earlier one to the same prompt, if its reward is higher. Its ratio is that
        to the probabilities that it was drawn with.
      equal_steps: the run stops if in so many rollouts in a row all answers to each
        prompt have the same reward, so nothing is learned; 0 to continue.

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
      ...     batch_size=2,
      ...     progress=False,
      ... )
    """

    rewards: Sequence[str | RewardFunction] = ()
    weights: Sequence[AnyNumber] | None = None
    group: SampleCount = 8
    new_tokens: AxisLength = 64
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
        """Checks that there are rewards exactly if an objective learns from them.

        Args:
          objective: its name.
          learned: whether it does.

        Raises:
          InputError: with what to set.
        """
        if not learned and self.rewards:
            raise InputError(
                f"Rollouts.rewards is {shown(self.described().rewards)}, but "
                f"{objective} learns from a teacher and reads no rewards: leave them "
                "out, or learn from them with GRPO (--loss grpo)"
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
                "at least one, such as ['exact_match'] (--reward exact_match)"
            )
        if learned and self.group < 2:
            raise InputError(
                f"Rollouts.group is {self.group}, expected a number from 2 to 128: "
                f"{objective} compares the answers to a prompt"
            )

    def described(self) -> "Rollouts":
        """Returns the settings as a config can hold them: functions by their names."""
        return dataclasses.replace(self, rewards=list(map(reward_name, self.rewards)))


def reward_name(reward: str | RewardFunction) -> str:
    """Returns how a config names a reward."""
    if isinstance(reward, str):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    return f"{FROM_PYTHON}{name}"
