"""Checks the options of the flat command line, before anything heavy is imported."""

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from prompt_tuning.config.config_values import literal
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.factory_outlines import outline
from prompt_tuning.config.methods import DEFAULT, METHODS, Method, find_method
from prompt_tuning.core.errors import InputError, did_you_mean, shortened
from prompt_tuning.core.field_checks import check_range
from prompt_tuning.core.flat_option import METHOD
from prompt_tuning.core.flat_options import OPTIONS, SCHEDULES, TABLE
from prompt_tuning.core.number_ranges import as_number, range_of

Choices = Mapping[str, Any]
"""Values of the options that were given, by name."""

_FILE_OF = {"method": "prompts/ or adapters/", "loss": "losses/"}
START = """\
nothing to train was given. Name a model and data:
  prompt-tuning train --model PATH --train train.jsonl --eval dev.jsonl --out runs/first
or a config (`prompt-tuning configs` lists them), or a run to continue:
  prompt-tuning train --gin_file runs/first_prompt.gin --gin.MODEL='"PATH"' ...
  prompt-tuning train --run runs/first"""
NO_MODEL = (
    "neither a run nor a model was given: give a finished run, --run runs/first; or a "
    "model and what was trained for it, --model PATH --prompt PATH; or a config, "
    "--gin_file FILE"
)


def check_numbers(choices: Choices) -> None:
    """Checks that numbers are in the ranges of their options.

    Raises:
      InputError: for the first one that is not.
    """
    for name, value in choices.items():
        option = OPTIONS[name]
        number = as_number(value)
        if option.is_number and number is not None:
            check_range(option.flag, number, range_of(option.kind))


def check_duration(choices: Choices, bindings: Sequence[str]) -> None:
    """Checks that the length of a run is given in steps or in epochs.

    Args:
      choices: the options.
      bindings: bindings of parameters and macros.

    Raises:
      InputError: if both are given.
    """
    steps = OPTIONS["steps"]
    bound = {binding.partition("=")[0].strip() for binding in bindings}
    if "epochs" in choices and (
        "steps" in choices or bound & {steps.setting, steps.macro}
    ):
        raise InputError(
            "--epochs and --steps both set the length of the run: leave one of them out"
        )


def check_training(choices: Choices) -> None:
    """Checks the options of a run that is configured by them alone.

    Raises:
      InputError: if an option is missing, or has no effect.
    """
    if not choices:
        raise InputError(START)
    for name in ("model", "train"):
        if name not in choices:
            option = OPTIONS[name]
            raise InputError(f"{option.flag} is missing: {option.help}")
    name = choices.get("method", DEFAULT)
    method = find_method(name)
    for option in TABLE:
        depends = option.group == METHOD and option.name != "method"
        if depends and option.name in choices and not _uses(method, option.name):
            users = [n for n, m in METHODS.items() if _uses(m, option.name)]
            raise InputError(
                f"{option.flag} has no effect on --method {name}; it is an option of "
                f"{', '.join(users)}"
            )
    method.fill(choices)
    _check_loss(choices)
    if "eval" not in choices:
        _refuse(
            {
                "eval_every": "there is no --eval",
                "exact_match": "there is no --eval",
                "keep_best": "there is no --eval",
                **_unused_labels(choices),
            },
            choices,
        )


def _unused_labels(choices: Choices) -> dict[str, str]:
    used = choices.get("loss", "").startswith("class_")
    used |= choices.get("method") == "class_labels"
    return {} if used else {"labels": "there is no --eval"}


def check_frozen(choices: Choices) -> None:
    """Checks the options of a frozen model without a config.

    Raises:
      InputError: if there is no model.
    """
    if "model" not in choices:
        raise InputError(NO_MODEL)


def _uses(method: Method, option: str) -> bool:
    return any(given.option == option for given in method.options())


def _check_loss(choices: Choices) -> None:
    loss = choices.get("loss", "")
    if loss.startswith("class_") and "labels" not in choices:
        raise InputError(f"--loss {loss} needs --labels: {OPTIONS['labels'].help}")
    if loss == "context_distillation" and "context" not in choices:
        raise InputError(f"--loss {loss} needs --context: {OPTIONS['context'].help}")
    if loss != "context_distillation":
        reason = "only --loss context_distillation reads it"
        _refuse({"context": reason}, choices)


def _refuse(reasons: Mapping[str, str], choices: Choices) -> None:
    for name, reason in reasons.items():
        if name in choices:
            raise InputError(f"{OPTIONS[name].flag} has no effect: {reason}")


def default_directory(choices: Choices) -> str:
    """Returns the run directory of a run without `--out`: its model and its method."""
    model = PurePath(choices["model"]).name.rpartition(":")[2]
    plain = re.sub(r"[^\w.+-]+", "-", model).strip(".-") or "model"
    return f"runs/{plain}-{choices.get('method', DEFAULT)}"


def choices_in(
    bindings: Sequence[str], *, macros: bool
) -> tuple[dict[str, Any], list[str]]:
    """Separates bindings that name an option, such as `learning_rate = 0.1`.

    Args:
      bindings: bindings as gin reads them.
      macros: whether macros of the shipped configs, such as `LEARNING_RATE`, name
        options too.

    Returns:
      the values by option, and the other bindings.

    Raises:
      InputError: if macros name options, and a name is neither.
    """
    names = {name: name for name in OPTIONS}
    if macros:
        names |= {option.macro: option.name for option in TABLE if option.macro}
    choices, others = {}, []
    for binding in bindings:
        left, _, value = binding.partition("=")
        if left.strip() in names:
            name = names[left.strip()]
            text = value.strip()
            choices[name] = _as_option(name, literal(text, default=text))
        elif macros and "." not in left:
            name = left.strip()
            raise InputError(
                f"there is no setting {shortened(name)}{did_you_mean(name, names)}"
            )
        else:
            others.append(binding)
    return choices, others


def _as_option(name: str, value: Any) -> Any:
    """Returns a value as the option would have it: one file is a list of files."""
    return [value] if OPTIONS[name].kind is list and isinstance(value, str) else value


def option_bindings(
    choices: Choices, macros: Collection[str], words: Collection[str] = ()
) -> list[str]:
    """Writes options as bindings of the config of `--gin_file` or `--run`.

    An option sets the macro of its name, or else its parameter.

    Args:
      choices: the options.
      macros: macros that the config uses.
      words: all words of the config, for messages.

    Raises:
      InputError: for an option that a config needs another way for.
    """
    bindings = []
    for name, value in choices.items():
        option = OPTIONS[name]
        if option.macro in macros:
            bindings.append(f"{option.macro} = {value!r}")
        elif name == "eval":
            bindings += [
                "Run.evaluation = @Evaluation()",
                "Evaluation.data = @evaluation/DataSource()",
                f"{option.setting} = {value!r}",
            ]
        elif option.setting:
            bindings.append(f"{option.setting} = {value!r}")
        else:
            raise InputError(_without_option(name, value, words))
    return bindings


def _without_option(name: str, value: Any, words: Collection[str]) -> str:
    """Explains what to type instead of an option that a config does not have."""
    option = OPTIONS[name]
    if name in _FILE_OF:
        file = METHODS[value].config if value in METHODS else f"losses/{value}.gin"
        return (
            f"{option.flag} {value} is for runs without a config: give the config's "
            f"file after the others, --gin_file {file}"
        )
    schedule = f"'@{SCHEDULES.get(value)}()'"
    settings = {
        "learning_rate": ("learning_rate", value),
        "optimizer": ("optimizer", f"'@{value}()'"),
        "schedule": ("learning_rate", schedule if SCHEDULES.get(value) else "NUMBER"),
        "prompt_length": ("length", value),
    }
    parameter, typed = settings.get(name, ("", None))
    way = " or ".join(
        f"--gin.{factory}.{parameter}={typed}"
        for factory in sorted(FACTORIES.keys() & set(words))
        if parameter in inspect.signature(outline(factory)).parameters
    )
    missing = f"{option.flag} sets the macro {option.macro}, which the config has not"
    if not option.macro:
        missing = f"{option.flag} is for runs without a config"
    hint = f", such as {way}" if way else ""
    return f"{missing}: set the parameter of the config by --gin.NAME=value{hint}"
