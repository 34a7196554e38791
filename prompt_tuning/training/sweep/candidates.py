"""The candidates of the method "auto", and the choice among them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.config.config_table import DEFAULT_METHOD, choices_of
from prompt_tuning.core.errors import InputError, NotFiniteError
from prompt_tuning.core.typed_json import read_object

if TYPE_CHECKING:
    from prompt_tuning.training.sweep.sweep_summary import SweepSummary

METHODS = (DEFAULT_METHOD, "prefix", "lora")
FACTORS = (0.3, 1, 3)
"""Learning rates to try, relative to the method's default."""

SHARE, FEWEST = 10, 20
"""A candidate takes one step per `SHARE` steps of the run, and at least `FEWEST`."""

EVALUATIONS = 5
"""Number of evaluations of a candidate."""

BUDGET = 300.0
"""Seconds of all sweeps together."""

FOLDER, CHOICE_FILE = "candidates", "choice.json"


def candidate_rates(method: str) -> list[float]:
    """Returns the learning rates to try with a method."""
    _, rate = choices_of("method")[method].optimizer
    return [float(f"{factor * rate:g}") for factor in FACTORS]


def candidate_steps(steps: int) -> int:
    """Returns the number of steps of each candidate."""
    return min(steps, max(FEWEST, steps // SHARE))


def winner(summaries: Mapping[str, "SweepSummary"]) -> tuple[str, float]:
    """Returns the method and learning rate of the best member of all sweeps.

    Raises:
      NotFiniteError: if all members diverged.
    """
    best = [
        (result.best_value, method, result.varies["learning_rate"])
        for method, summary in summaries.items()
        for result in summary.results
        if result.name == summary.best and result.best_value is not None
    ]
    if not best:
        raise NotFiniteError(
            "all candidates of the method 'auto' diverged: name a method and a lower "
            "learning rate"
        )
    directions = {summary.by[1] for summary in summaries.values()}
    choice = min if directions == {"min"} else max
    _, method, rate = choice(best, key=lambda candidate: candidate[0])
    return method, float(rate)


def chosen_before(file: Path, given: Mapping[str, str]) -> tuple[str, float]:
    """Reads the method and learning rate of an earlier choice.

    Args:
      file: the choice.
      given: settings of the run, as text.

    Raises:
      InputError: if the choice was made with other settings, or the file is damaged.
    """
    record = read_object(file)
    recorded = record.nested("given").values
    differing = [k for k in {**recorded, **given} if recorded.get(k) != given.get(k)]
    if differing:
        raise InputError(
            f"{file} has a choice that the method 'auto' made for other settings: "
            f"{', '.join(sorted(differing))} differs; choose another directory"
        )
    method, rate = record.text("method"), record.number("learning_rate")
    if method not in METHODS:
        record.refuse("method", f"one of {', '.join(METHODS)}")
    return method, rate
