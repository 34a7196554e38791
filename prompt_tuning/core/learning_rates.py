"""Learning rate schedules: a linear warm-up, then a decay.

Each function returns an optax schedule, i.e. a function from the step number (from 0)
to the learning rate.
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
    """Learning rate that rises linearly to `peak` and stays there.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of warm-up steps; 0 for none.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_constant(0.4, warmup_steps=2).build()
      >>> print(numpy.array(rate(jax.numpy.arange(4))).round(2))
      [0.2 0.3 0.4 0.4]
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
    """Learning rate that rises linearly to `peak`, then falls linearly.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run; `tune` fills it in.
      warmup_steps: number of steps of the rise; half of the run, with a warning, if the
        run has no more steps than this.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_linear_decay(
      ...     0.4, steps=6, warmup_steps=2, final_fraction=0.0
      ... ).build()
      >>> print(numpy.array(rate(jax.numpy.arange(6))).round(2))
      [0.2 0.3 0.4 0.3 0.2 0.1]
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
    """Learning rate that rises linearly to `peak`, then falls like half a cosine.

    Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run; `tune` fills it in.
      warmup_steps: as in `warmup_linear_decay`.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_cosine_decay(
      ...     0.4, steps=6, warmup_steps=2, final_fraction=0.0
      ... ).build()
      >>> print(numpy.array(rate(jax.numpy.arange(6))).round(2))
      [0.2  0.3  0.4  0.34 0.2  0.06]
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
    """Learning rate that rises linearly to `peak`, then falls as `1 / sqrt(step)`.

    Use it if you do not know how long the run will be. It is the schedule of T5's
    training (Raffel et al. 2020, section 3.1.2), except that T5's rate was constant
    during warm-up.

    Args:
      peak: maximum learning rate.
      warmup_steps: number of warm-up steps, at least 1.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> rate = pt.warmup_rsqrt_decay(0.4, warmup_steps=2).build()
      >>> print(numpy.array(rate(jax.numpy.arange(4))).round(2))
      [0.2  0.3  0.4  0.33]
    """

    def fall(step):
        return peak * jnp.sqrt(warmup_steps / (warmup_steps + step))

    return _after_warmup(fall, peak, warmup_steps)


def _after_warmup(
    schedule: optax.Schedule, peak: PositiveNumber, warmup_steps: int
) -> optax.Schedule:
    rise = optax.linear_schedule(peak / max(warmup_steps, 1), peak, warmup_steps)
    return optax.join_schedules([rise, schedule], [warmup_steps])


def _shortened_warmup(warmup_steps: int, steps: int) -> int:
    """Shortens the warm-up to at most half of the run."""
    if warmup_steps < steps:
        return warmup_steps
    warnings.warn(
        f"the run has {steps} steps, so its warm-up takes {steps // 2} instead of "
        f"{warmup_steps}",
        stacklevel=4,
    )
    return steps // 2
