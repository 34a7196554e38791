"""Learning rates that depend on the step: a linear rise, then a decay.

Each function returns an optax schedule, a function from the number of the step, from 0,
to its learning rate.
"""

import warnings

import jax.numpy as jnp
import optax

from prompt_tuning.core.field_checks import checks_arguments
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    PositiveNumber,
    Share,
)


@checks_arguments
def warmup_constant(
    peak: PositiveNumber, *, warmup_steps: NonnegativeInteger = 10
) -> optax.Schedule:
    """Linear warm-up to `peak`, then `peak`.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of steps of the warm-up; 0 for none.

    Raises:
      InputError: if a number is out of range, which its type states.
    """
    return _after_warmup(optax.constant_schedule(peak), peak, warmup_steps)


@checks_arguments
def warmup_linear_decay(
    peak: PositiveNumber,
    steps: PositiveInteger,
    *,
    warmup_steps: NonnegativeInteger = 10,
    final_fraction: Share = 0.05,
) -> optax.Schedule:
    """Linear warm-up to `peak`, then linear decay to `final_fraction` of it.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run.
      warmup_steps: number of steps of the warm-up; half of the run, with a warning, if
        the run has no more steps than this.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range, which its type states.
    """
    warmup_steps = _shortened_warmup(warmup_steps, steps)
    fall = optax.linear_schedule(peak, peak * final_fraction, steps - warmup_steps)
    return _after_warmup(fall, peak, warmup_steps)


@checks_arguments
def warmup_cosine_decay(
    peak: PositiveNumber,
    steps: PositiveInteger,
    *,
    warmup_steps: NonnegativeInteger = 10,
    final_fraction: Share = 0.05,
) -> optax.Schedule:
    """Linear warm-up to `peak`, then half a cosine down to `final_fraction` of it.

    Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run.
      warmup_steps: as in `warmup_linear_decay`.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range, which its type states.
    """
    warmup_steps = _shortened_warmup(warmup_steps, steps)
    fall = optax.cosine_decay_schedule(
        peak, max(steps - warmup_steps, 1), final_fraction
    )
    return _after_warmup(fall, peak, warmup_steps)


@checks_arguments
def warmup_rsqrt_decay(
    peak: PositiveNumber, *, warmup_steps: PositiveInteger = 10
) -> optax.Schedule:
    """Linear warm-up to `peak`, then `peak * sqrt(warmup_steps / step)`.

    The schedule with which T5 was trained (Raffel et al. 2020, section 3.1.2), apart
    from the warm-up, during which T5's rate was constant.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of steps of the warm-up, at least 1.

    Raises:
      InputError: if a number is out of range, which its type states.
    """

    def fall(step):
        return peak * jnp.sqrt(warmup_steps / (warmup_steps + step))

    return _after_warmup(fall, peak, warmup_steps)


def _after_warmup(
    schedule: optax.Schedule, peak: PositiveNumber, warmup_steps: int
) -> optax.Schedule:
    """Puts a linear warm-up before a schedule."""
    rise = optax.linear_schedule(peak / max(warmup_steps, 1), peak, warmup_steps)
    return optax.join_schedules([rise, schedule], [warmup_steps])


def _shortened_warmup(warmup_steps: int, steps: int) -> int:
    """Returns the steps of the warm-up, at most half of a run that is shorter."""
    if warmup_steps < steps:
        return warmup_steps
    warnings.warn(
        f"the run has {steps} steps, so its warm-up takes {steps // 2} instead of "
        f"{warmup_steps}",
        stacklevel=4,
    )
    return steps // 2
