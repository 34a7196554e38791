"""Parameter groups and their optimizers.

A parameter group is a list of regular expressions and an optax transformation. Each
expression must match a whole path. A parameter that no group matches is frozen: it is
not differentiated, has no optimizer state and is never copied.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import optax

from prompt_tuning.core.adapter_names import LORA_PLUS_RATIO
from prompt_tuning.core.bounded_updates import MOVING, update_moving_slots
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_value, checks_arguments
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    NonnegativeNumber,
    PositiveInteger,
    PositiveNumber,
    ShareBelowOne,
)
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.core.quantization.stores import is_quantized
from prompt_tuning.core.setting_hints import how_to_set

Leaf = TypeVar("Leaf")
LearningRate = PositiveNumber | optax.Schedule
StateType = Literal["float32", "bfloat16"]
FASTER = ("/lora/b", "/lora/magnitude", "/lora/bias")
"""Ends of the paths whose updates `ParameterGroup.lora_plus_ratio` multiplies."""
CONSTANT = ("/lora/start_a", "/lora/start_b")
"""Ends of the paths that a run stores with what it trains, but does not change."""


def match_any(regexes: Sequence[str]) -> Callable[[str], bool]:
    """Returns a predicate: does any of the expressions match the whole path?

    Raises:
      InputError: if RE2 cannot compile one of them.
    """
    compiled = [compile_pattern(regex, "regexes") for regex in regexes]
    return lambda path: any(pattern.matches(path) for pattern in compiled)


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters that one optimizer trains; everything that no group names is frozen.

    `tune` makes the groups of prompts and adapters itself. Pass `groups` to use
    different optimizers for different parts, or to train some of the model's own
    weights, too.

    Attributes:
      regexes: expressions that each match the whole slash-joined path of a parameter.
      optimizer: transformation that updates the parameters, e.g. `adamw()`.
      lora_plus_ratio: learning rate of LoRA's `b`, DoRA's magnitudes and trained
        biases, divided by that of `a` (LoRA+, Hayou et al. 2024).

    Raises:
      InputError: if `regexes` is not a list, `optimizer` is not an optimizer, an
        expression matches no parameter, or the ratio is given without LoRA.

    Examples:
      >>> prompt = pt.ParameterGroup([".*/prompt/.*"], pt.adafactor(0.3))
      >>> norms = pt.ParameterGroup([".*/final_norm/.*"], pt.adamw(1e-4))
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     groups=[prompt, norms],
      ...     steps=2,
      ...     progress=False,
      ... )
    """

    regexes: Sequence[str]
    optimizer: optax.GradientTransformation
    lora_plus_ratio: PositiveNumber = LORA_PLUS_RATIO

    def __post_init__(self):
        check_value(
            "ParameterGroup.lora_plus_ratio", self.lora_plus_ratio, PositiveNumber
        )
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
    """Returns the index of the group that trains each path, without frozen paths.

    If `parameters` has arrays (or their shapes) by path, their dtypes are checked.

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
    _check_ratios(groups, labels)
    if not labels:
        raise InputError("no parameter group was given, so nothing would be trained")
    if isinstance(parameters, Mapping):
        _refuse_quantized(parameters, labels)
    return labels


def _check_ratios(groups: Sequence[ParameterGroup], labels: Mapping[str, int]) -> None:
    for index, group in enumerate(groups):
        in_group = [path for path, number in labels.items() if number == index]
        if group.lora_plus_ratio != 1 and not any(x.endswith(FASTER) for x in in_group):
            raise InputError(
                f"ParameterGroup.lora_plus_ratio is {group.lora_plus_ratio:g}, but the "
                f"group of {', '.join(map(repr, group.regexes))} trains no LoRA; leave "
                "it out"
            )


def _refuse_quantized(parameters: Mapping[str, Any], labels: Mapping[str, int]) -> None:
    quantized = [path for path in labels if is_quantized(parameters[path])]
    if quantized:
        listed = ", ".join(quantized[:3]) + (", ..." if len(quantized) > 3 else "")
        raise InputError(
            f"the parameter groups would train {len(quantized)} quantized parameters "
            f"({listed}), and integers have no gradient; match other paths, or give "
            f"{how_to_set('Pretrained.parameter_dtype', 'bfloat16')}"
        )


def check_matches(regexes: Sequence[str], paths: Sequence[str], setting: str) -> None:
    """Checks that each expression matches the whole path of a parameter.

    Raises:
      InputError: for the first expression that matches nothing.
    """
    for regex in regexes:
        if not any(map(match_any([regex]), paths)):
            raise InputError(f"{setting}: {_no_match(regex, paths)}")


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
    groups: Sequence[ParameterGroup],
    labels: Mapping[str, int],
    frozen_slots: Mapping[str, int] | None = None,
) -> optax.GradientTransformation:
    """Builds one transformation that updates each parameter by its group.

    Args:
      groups: the parameter groups.
      labels: group of each trained parameter, by path.
      frozen_slots: how many of a prefix's first slots are frozen, by path.
    """
    frozen = {p: count for p, count in (frozen_slots or {}).items() if p in labels}
    if frozen:
        moving = {p + MOVING if p in frozen else p: x for p, x in labels.items()}
        return update_moving_slots(group_optimizer(groups, moving), frozen)
    transforms: dict[Hashable, optax.GradientTransformation] = {
        index: group.optimizer
        if group.lora_plus_ratio == 1
        else optax.chain(group.optimizer, _faster_b(group.lora_plus_ratio))
        for index, group in enumerate(groups)
    }
    constant = [path for path in labels if path.endswith(CONSTANT)]
    if constant:
        transforms[-1] = optax.set_to_zero()  # weights do not decay either
    return optax.multi_transform(transforms, {**labels, **dict.fromkeys(constant, -1)})


def _faster_b(ratio: float | int) -> optax.GradientTransformation:
    """Multiplies the updates of LoRA's second factors, and of magnitudes."""

    def scale(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
        return jax.tree.map_with_path(
            lambda path, x: ratio * x if path[-1].key.endswith(FASTER) else x, updates
        )

    return optax.stateless(scale)


@checks_arguments
def adafactor(
    learning_rate: LearningRate = 0.3,
    *,
    decay_rate: PositiveNumber = 0.8,
    decay_offset: NonnegativeInteger = 0,
    multiply_by_parameter_scale: bool = False,
    clipping_threshold: PositiveNumber | None = 1.0,
    momentum: ShareBelowOne | None = None,
    dtype_momentum: StateType = "float32",
    weight_decay_rate: ShareBelowOne | None = 1e-5,
    eps: NonnegativeNumber = 1e-30,
    factored: bool = True,
    min_dim_size_to_factor: PositiveInteger = 128,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018), with the recipe of Lester et al. 2021.

    The default of `tune` for prompts. Its steps do not depend on the gradient's scale,
    which suits vectors whose gradient passes through the whole model.

    Args:
      learning_rate: a number or a schedule such as `warmup_constant(0.3)`.
      decay_rate: exponent with which second moments decay.
      decay_offset: number of steps that the decay counts as done.
      multiply_by_parameter_scale: whether an update is multiplied by the RMS of its
        parameter.
      clipping_threshold: maximum RMS of an update; None for none.
      momentum: decay of the average of updates; None for no average.
      dtype_momentum: dtype of this average.
      weight_decay_rate: fraction of the parameter subtracted per step, independent of
        the learning rate; None for none.
      eps: added to squared gradients.
      factored: whether second moments of matrices are stored by row and column.
      min_dim_size_to_factor: smallest matrices to factor.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     optimizer=pt.adafactor(0.1, weight_decay_rate=None),
      ...     steps=2,
      ...     progress=False,
      ... )
    """
    return optax.adafactor(
        learning_rate=learning_rate,
        decay_rate=decay_rate,
        decay_offset=decay_offset,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        clipping_threshold=clipping_threshold,
        momentum=momentum,
        dtype_momentum=dtype_momentum,
        weight_decay_rate=weight_decay_rate,
        eps=eps,
        factored=factored,
        min_dim_size_to_factor=min_dim_size_to_factor,
    )


@checks_arguments
def adamw(
    learning_rate: LearningRate = 1e-3,
    weight_decay: NonnegativeNumber = 0.0,
    clip_norm: PositiveNumber | None = None,
    *,
    b1: ShareBelowOne = 0.9,
    b2: ShareBelowOne = 0.999,
    eps: NonnegativeNumber = 1e-8,
    eps_root: NonnegativeNumber = 0.0,
    mu_dtype: StateType | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), with gradient clipping.

    The default of `tune` for LoRA, IA3 and prefixes.

    Args:
      learning_rate: a number or a schedule such as `warmup_cosine_decay(1e-3)`.
      weight_decay: fraction of the parameter subtracted per step, times the learning
        rate.
      clip_norm: maximum global norm of the group's gradient; None for no clipping.
      b1: decay of the average of gradients.
      b2: decay of the average of squared gradients.
      eps: added to the square root of the latter.
      eps_root: added to it under the square root.
      mu_dtype: dtype of the average of gradients; None for the parameter's.
      nesterov: whether the momentum is Nesterov's.

    Raises:
      InputError: if a number is out of range.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.LoRA(rank=4),
      ...     pairs,
      ...     optimizer=pt.adamw(3e-3, clip_norm=1.0),
      ...     steps=2,
      ...     progress=False,
      ... )
    """
    step = optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )
    if clip_norm is None:
        return step
    return optax.chain(optax.clip_by_global_norm(clip_norm), step)
