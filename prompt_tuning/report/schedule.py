"""The learning rate of each logged step, from a run's config."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prompt_tuning.core import learning_rates
from prompt_tuning.core.errors import InputError

SCHEDULES = (
    "warmup_constant",
    "warmup_linear_decay",
    "warmup_cosine_decay",
    "warmup_rsqrt_decay",
)


def learning_rate_curve(
    values: Mapping[str, Mapping[str, Any]], steps: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Returns the steps and their learning rates.

    A step logged as `n` has taken the rate at `n - 1`, because schedules count from 0.
    Both lists are empty if the config has no rate, more than one, or a user-defined
    one.
    """
    schedules = [name for name in SCHEDULES if name in values]
    numbers = {
        float(x["learning_rate"])
        for x in values.values()
        if isinstance(x.get("learning_rate"), int | float)
    }
    if len(schedules) + len(numbers) != 1:
        return [], []
    if numbers:
        return [*steps], [*numbers] * len(steps)
    try:
        schedule = getattr(learning_rates, schedules[0])(**values[schedules[0]])
    except (InputError, TypeError):
        return [], []
    rates = np.asarray(schedule(np.asarray(steps) - 1), np.float64)
    return [*steps], [float(x) for x in np.broadcast_to(rates, len(steps))]
