"""Convert epochs to steps."""

import math
from fractions import Fraction

from prompt_tuning.config.run import Run
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveInteger
from prompt_tuning.training.run_plan import RunPlan, plan_run


def steps_of_epochs(run: Run, epochs: int | float) -> int:
    """Returns the number of steps of `epochs` passes over a run's data.

    A fraction is rounded up to whole steps.
    """
    return count_steps(plan_run(run), epochs)


def count_steps(plan: RunPlan, epochs: int | float) -> int:
    """Returns the number of steps of a planned run; see `steps_of_epochs`."""
    batches = plan.batch_plan(plan.examples()).batches_per_epoch
    # A float such as 0.1 stands for the decimal fraction that was written.
    steps = math.ceil(Fraction(str(epochs)) * batches)
    check_value(f"the number of steps of {epochs:g} epochs", steps, PositiveInteger)
    return steps
