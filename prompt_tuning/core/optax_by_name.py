"""Optax transformations by name, for configs, which cannot import them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from prompt_tuning.core.errors import InputError, did_you_mean, kind_of, shown
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import AnyInteger, AnyNumber
from prompt_tuning.core.parameter_groups import LearningRate

Argument = AnyNumber | AnyInteger | bool | str | None


def optax_transformation(
    name: str,
    arguments: Mapping[str, Argument] | None = None,
    learning_rate: LearningRate | None = None,
) -> optax.GradientTransformation:
    """Names any transformation of optax, so that a run's config can record it.

    From Python you may also pass optax's own object, `tune(...,
    optimizer=optax.lion(1e-4))`, but then the command line cannot resume the run.

    Args:
      name: name of a public function of optax, e.g. `lion`, `sgd` or
        `clip_by_global_norm`.
      arguments: its arguments by name: numbers, texts, true, false or None.
      learning_rate: the argument of this name, a number or a schedule.

    Raises:
      InputError: if there is no such function, an argument is missing, unknown or
        refused, or the transformation needs more than gradients and parameters.

    Examples:
      >>> lion = pt.optax_transformation("lion", {"b1": 0.95}, learning_rate=1e-2)
      >>> isinstance(lion.build(), optax.GradientTransformation)
      True
    """
    function = _function(name)
    keywords: dict[str, Any] = dict(arguments or {})
    if learning_rate is not None:
        if "learning_rate" in keywords:
            raise InputError(f"the learning rate of optax.{name} is given twice")
        keywords["learning_rate"] = learning_rate
    if "learning_rate" in keywords:
        rate = keywords["learning_rate"]
        check_value(f"the learning rate of optax.{name}", rate, LearningRate)
    _check_names(name, function, keywords)
    try:
        transformation = function(**keywords)
        _check_update(transformation)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"optax.{name} cannot be used with the arguments {shown(keywords)}: "
            f"{shown(str(error))}"
        ) from error
    return transformation


def optax_chain(parts: Sequence[Any]) -> optax.GradientTransformation:
    """Applies transformations one after another; the first receives the gradient.

    Args:
      parts: the transformations, at least one.

    Raises:
      InputError: if a part is not a transformation.

    Examples:
      >>> clip = pt.optax_transformation("clip_by_global_norm", {"max_norm": 1.0})
      >>> clipped = pt.optax_chain([clip, pt.adafactor(0.3)])
      >>> pt.ParameterGroup([".*/prompt/.*"], clipped).parameters["regexes"]
      ['.*/prompt/.*']
    """
    wrong = [part for part in parts if not hasattr(part, "update")]
    if wrong or not parts:
        text = f"has {kind_of(wrong[0])}" if wrong else "is empty"
        raise InputError(
            f"optax_chain.parts {text}, expected transformations, such as "
            "[@clip/optax_transformation(), @adamw()]"
        )
    return optax.chain(*parts)


def _function(name: str):
    functions = {
        function_name: function
        for function_name, function in vars(optax).items()
        if inspect.isfunction(function)
        and "GradientTransformation" in str(function.__annotations__.get("return"))
        and not function_name.startswith("_")
    }
    if name not in functions:
        raise InputError(
            f"optax has no transformation {shown(name)}{did_you_mean(name, functions)}"
        )
    return functions[name]


def _check_names(name: str, function, keywords: Mapping[str, object]) -> None:
    parameters = inspect.signature(function).parameters
    for argument in keywords:
        if argument not in parameters:
            raise InputError(
                f"optax.{name} has no argument {shown(argument)}"
                f"{did_you_mean(argument, parameters)}"
            )
    missing = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in keywords
    ]
    if missing:
        raise InputError(
            f"optax.{name} needs {', '.join(missing)}: give them as "
            f"optax_transformation.arguments = {{{missing[0]!r}: ...}}"
        )


def _check_update(transformation: optax.GradientTransformation) -> None:
    """Checks that a step can use a transformation, without computing anything.

    Raises:
      InputError: if its state has leaves that are not arrays of numbers.
    """
    parameters = {"prompt": jnp.zeros((2, 2))}

    def update(gradient):
        state = transformation.init(parameters)
        return transformation.update(gradient, state, parameters)

    _, state = jax.eval_shape(update, parameters)
    if any(
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        for leaf in jax.tree.leaves(state)
    ):
        raise InputError("its state has a key of random numbers, which is not saved")
