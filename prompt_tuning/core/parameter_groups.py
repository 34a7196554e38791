"""Parameter groups and their optimizers.

A parameter group is a list of regular expressions and an optax transformation. Each
expression must match a whole path; a parameter that no group matches is frozen: it is
not differentiated, has no optimizer state and is never copied.
"""

import dataclasses
import difflib
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import optax

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.core.setting_hints import how_to_set

Leaf = TypeVar("Leaf")
LearningRate = float | optax.Schedule


def match_any(regexes: Sequence[str]) -> Callable[[str], bool]:
    """Returns a predicate: does any of the expressions match the whole path?

    Raises:
      InputError: if one of them is not a regular expression, or too complex.
    """
    compiled = [compile_pattern(regex, "regexes") for regex in regexes]
    return lambda path: any(pattern.fullmatch(path) for pattern in compiled)


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one optimizer trains.

    Attributes:
      regexes: expressions that each match the whole slash-joined path of a parameter.
      optimizer: transformation that updates the parameters.
    """

    regexes: Sequence[str]
    optimizer: optax.GradientTransformation

    def __post_init__(self):
        if isinstance(self.regexes, str):
            raise InputError(
                f"ParameterGroup.regexes is {shown(self.regexes)}, expected a list of "
                "strings"
            )
        if not hasattr(self.optimizer, "update"):
            raise InputError(
                f"ParameterGroup.optimizer is {shown(self.optimizer)}, expected an "
                "optax transformation; write @adafactor() with its parentheses"
            )


def label(
    parameters: Iterable[str] | Mapping[str, Any], groups: Sequence[ParameterGroup]
) -> dict[str, int]:
    """Returns the index of the group that trains each path; frozen paths are left out.

    Args:
      parameters: paths; or arrays (or their shapes) by path, whose dtypes are checked.
      groups: the parameter groups.

    Raises:
      InputError: if an expression matches nothing, two groups match one path, or a
        group would train a quantized parameter.
    """
    paths = list(parameters)
    labels: dict[str, int] = {}
    for index, group in enumerate(groups):
        for regex in group.regexes:
            matched = [path for path in paths if match_any([regex])(path)]
            if not matched:
                raise InputError(_no_match(regex, paths))
            for path in matched:
                if labels.setdefault(path, index) != index:
                    raise InputError(
                        f"parameter {path} is in two groups: {regex!r} of group "
                        f"{index} matches it, and so does group {labels[path]} "
                        f"({', '.join(map(repr, groups[labels[path]].regexes))}); "
                        "remove one of them"
                    )
    if not labels:
        raise InputError("no parameter group was given, so nothing would be trained")
    if isinstance(parameters, Mapping):
        _refuse_quantized(parameters, labels)
    return labels


def _refuse_quantized(parameters: Mapping[str, Any], labels: Mapping[str, int]) -> None:
    quantized = [path for path in labels if parameters[path].dtype == np.int8]
    if quantized:
        shown = ", ".join(quantized[:3]) + (", ..." if len(quantized) > 3 else "")
        raise InputError(
            f"the parameter groups would train {len(quantized)} int8 parameters "
            f"({shown}), and integers have no gradient; match other paths, or give "
            f"{how_to_set('Pretrained.parameter_dtype', 'bfloat16')}"
        )


def _no_match(regex: str, paths: Sequence[str]) -> str:
    plain = re.sub(r"[\\.*+?^$()\[\]{}|]", "", regex)
    nearest = sorted(
        paths, key=lambda path: -difflib.SequenceMatcher(None, plain, path).ratio()
    )[:5]
    return (
        f"the expression {regex!r} matches no parameter (it must match the whole "
        f"path); the nearest of {len(paths)} paths are {', '.join(nearest)}"
    )


def partition(
    parameters: Mapping[str, Leaf], labels: Mapping[str, int]
) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Splits parameters into `(trained, frozen)`."""
    trained = {path: leaf for path, leaf in parameters.items() if path in labels}
    frozen = {path: leaf for path, leaf in parameters.items() if path not in labels}
    return trained, frozen


def group_optimizer(
    groups: Sequence[ParameterGroup], labels: Mapping[str, int]
) -> optax.GradientTransformation:
    """Builds one transformation that updates each parameter as its group sets."""
    transforms: dict[Hashable, optax.GradientTransformation] = {
        index: group.optimizer for index, group in enumerate(groups)
    }
    return optax.multi_transform(transforms, dict(labels))


def adafactor(learning_rate: LearningRate = 0.3) -> optax.GradientTransformation:
    """Adafactor without parameter scaling, the recipe of Lester et al. 2021.

    Second moments decay with exponent 0.8, updates are clipped at RMS 1, and each step
    multiplies the parameter by `1 - 1e-5`, independent of the learning rate.

    Args:
      learning_rate: a number or an optax schedule.
    """
    _check_rate(learning_rate)
    return optax.adafactor(
        learning_rate=learning_rate,
        decay_rate=0.8,
        multiply_by_parameter_scale=False,
        clipping_threshold=1.0,
        weight_decay_rate=1e-5,
    )


def adamw(
    learning_rate: LearningRate = 1e-3,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """AdamW, after clipping the global norm of the gradient if `clip_norm` is set.

    Args:
      learning_rate: a number or an optax schedule.
      weight_decay: fraction of the parameter subtracted per step, times the learning
        rate.
      clip_norm: maximum global norm of the group's gradient.
    """
    _check_rate(learning_rate)
    step = optax.adamw(learning_rate, weight_decay=weight_decay)
    if clip_norm is None:
        return step
    return optax.chain(optax.clip_by_global_norm(clip_norm), step)


def _check_rate(learning_rate: object) -> None:
    if not callable(learning_rate) and not isinstance(learning_rate, int | float):
        raise InputError(
            f"learning_rate is {shown(learning_rate)}, expected a number or a schedule "
            "such as @warmup_linear_decay()"
        )


def warmup_linear_decay(
    peak: float, steps: int, *, warmup_steps: int = 10, final_fraction: float = 0.05
) -> optax.Schedule:
    """Linear warm-up to `peak`, then linear decay to `final_fraction` of it.

    Args:
      peak: maximum learning rate.
      steps: number of steps of the whole run.
      warmup_steps: number of steps of the warm-up; half of the run, with a warning, if
        the run has no more steps than this.
      final_fraction: fraction of `peak` that the step after the last would have.

    Raises:
      InputError: if `warmup_steps` is negative.
    """
    if warmup_steps < 0:
        raise InputError(f"warmup_steps is {warmup_steps}, expected at least 0")
    if warmup_steps >= steps:
        warnings.warn(
            f"the run has {steps} steps, so its warm-up takes {steps // 2} instead of "
            f"{warmup_steps}",
            stacklevel=2,
        )
        warmup_steps = steps // 2
    rise = optax.linear_schedule(peak / max(warmup_steps, 1), peak, warmup_steps)
    fall = optax.linear_schedule(peak, peak * final_fraction, steps - warmup_steps)
    return optax.join_schedules([rise, fall], [warmup_steps])
