"""Selects the newest or the best intact checkpoint of a run."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_files import verify
from prompt_tuning.checkpoints.run_store.checkpoint_names import (
    checkpoint_path,
    steps_in,
)
from prompt_tuning.core.errors import InputError, shortened

# A metric and "min" or "max"; validated at run time because it comes from a config.
KeepBest = tuple[str, str]
OnDamage = Callable[[str], None]
Check = Callable[[Path], dict[str, Any]]

_logger = logging.getLogger(__name__)


def latest_valid_step(
    folder: Path, on_damage: OnDamage = _logger.warning, check: Check = verify
) -> int | None:
    """Returns the newest step with intact files; None without checkpoints.

    `check` reads the state of a checkpoint and raises `InputError` if it is damaged;
    such a checkpoint is skipped, and `on_damage` is called with a message.

    Raises:
      InputError: if there are checkpoints and all are damaged.
    """
    steps, damage = steps_in(folder), []

    def note(message: str) -> None:
        damage.append(message)
        on_damage(message)

    for step, _ in intact_states(folder, steps[::-1], note, check):
        return step
    if steps:
        raise InputError(
            f"all checkpoints in {folder} are damaged (steps {steps}): replace them "
            "with a copy, or remove them to start again from step 0; of the newest, "
            f"{shortened(damage[0])}"
        )
    return None


def best_step(
    folder: Path,
    keep_best: KeepBest | None,
    on_damage: OnDamage = _logger.warning,
    check: Check = verify,
) -> int | None:
    """Returns the step with the best metric, the earliest one in case of a tie.

    `keep_best` is None to select no step. `read_state` as `check` does not read the
    other files; see `latest_valid_step` for the other arguments. Returns None if no
    intact checkpoint has the metric.
    """
    if keep_best is None:
        return None
    metric, direction = keep_best
    sign = 1 if direction == "min" else -1
    scored_steps = [
        (sign * state["metrics"][metric], step)
        for step, state in intact_states(folder, steps_in(folder), on_damage, check)
        if metric in state["metrics"]
    ]
    return min(scored_steps)[1] if scored_steps else None


def best_or_latest(folder: Path, on_damage: OnDamage = _logger.warning) -> Path:
    """Returns the best checkpoint of a run, or the newest if none has its metric.

    `folder` is the run's `numpy_checkpoints`. `on_damage` is called with a message for
    each damaged checkpoint, which is skipped.

    Raises:
      InputError: if there is no checkpoint, or all are damaged.
    """
    reported = set()

    def report_once(message: str) -> None:
        if message not in reported:
            reported.add(message)
            on_damage(message)

    # Checkpoints of a fully trained model have gigabytes: verify each only once.
    verify_once = functools.cache(verify)
    latest = latest_valid_step(folder, report_once, verify_once)
    if latest is None:
        raise InputError(f"{folder} contains no checkpoint; train the run first")
    state = verify_once(checkpoint_path(folder, latest))
    keep_best = tuple(state.get("keep_best") or ()) or None
    best = best_step(folder, keep_best, report_once, verify_once)
    return checkpoint_path(folder, latest if best is None else best)


def intact_states(
    folder: Path, steps: Sequence[int], on_damage: OnDamage, check: Check
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields step and state of each checkpoint that passes; reports the rest."""
    for step in steps:
        try:
            state = check(checkpoint_path(folder, step))
        except InputError as error:
            on_damage(f"{error}; checkpoint_{step} is skipped")
        else:
            yield step, state
