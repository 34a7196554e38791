"""Advantages: how much better an answer is than other answers to the same prompt."""

import numpy as np
from jaxtyping import Bool, Float64

from prompt_tuning.settings.rollout_settings import Advantage

SMALLEST_DEVIATION = 1e-4
"""Added to a group's standard deviation, as in TRL, to avoid division by 0."""


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
