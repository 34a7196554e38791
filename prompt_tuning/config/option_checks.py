"""Checks options before anything heavy is imported, e.g. `--steps 0`."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from prompt_tuning.config.config_table import (
    DEFAULT_LOSS,
    DEFAULT_METHOD,
    FOLDERS,
    ShippedConfig,
    choices_of,
    find_choice,
    settings_of,
)
from prompt_tuning.config.config_values import literal
from prompt_tuning.config.flat_option import METHOD
from prompt_tuning.config.flat_options import BESIDE, HEAD, OF_LOSSES, PROBLEM
from prompt_tuning.config.options import OPTIONS, TABLE
from prompt_tuning.core.errors import InputError, did_you_mean, shortened
from prompt_tuning.core.field_checks import check_range
from prompt_tuning.core.number_ranges import as_number, range_of
from prompt_tuning.data.rows.data_files import contains_text
from prompt_tuning.pretrained.checkpoint_path import check_checkpoint

Choices = Mapping[str, Any]
"""Values of the options that were given, by name."""

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

PATHS = {"model": check_checkpoint, "train": contains_text, "eval": contains_text}
"""Checks of the options that are paths, in this order."""


def check_values(choices: Choices, *, paths: bool) -> None:
    """Checks numbers by the ranges of their options, and `paths` to models and data."""
    for name, value in choices.items():
        option = OPTIONS[name]
        number = as_number(value)
        if option.is_number and number is not None:
            check_range(option.flag, number, range_of(option.kind))
    for name, check in PATHS.items() if paths else ():
        if name in choices:
            check(choices[name])


def check_training(choices: Choices) -> None:
    """Refuses a run without a config if an option is missing or has no effect."""
    if not choices:
        raise InputError(START)
    for name in ("model", "train"):
        if name not in choices:
            option = OPTIONS[name]
            raise InputError(f"{option.flag} is missing: {option.help}")
    name = choices.get("method", DEFAULT_METHOD)
    method = find_choice("method", name)
    for option in TABLE:
        depends = option.group == METHOD and option.name not in ("method", *BESIDE)
        if depends and option.name in choices and not _uses(method, option.name):
            raise InputError(
                f"{option.flag} has no effect on --method {name}; it is an option of "
                f"{_users('method', option.name)}"
            )
    if PROBLEM in choices and not (HEAD in choices or _uses(method, HEAD)):
        raise InputError(
            "--problem has no effect without a head: give --head, or leave it out"
        )
    _check_needed(f"--method {name}", method, choices)
    loss = choices.get("loss", DEFAULT_LOSS)
    objective = find_choice("loss", loss)
    _check_needed(f"--loss {loss}", objective, choices)
    unused = {
        name: f"only --loss {_users('loss', name)} reads it"
        for name in OF_LOSSES
        if not _uses(objective, name)
    }
    if "eval" not in choices:
        evaluating = ["eval_every", "exact_match", "keep_best"]
        read = _uses(objective, "labels") or _uses(method, "labels")
        if not (read or HEAD in choices):
            evaluating.append("labels")
        unused |= dict.fromkeys(evaluating, "there is no --eval")
    for name, reason in unused.items():
        if name in choices:
            raise InputError(f"{OPTIONS[name].flag} has no effect: {reason}")


def check_frozen(choices: Choices) -> None:
    """Refuses a run without a config and without a model."""
    if "model" not in choices:
        raise InputError(NO_MODEL)


def _uses(config: ShippedConfig, name: str) -> bool:
    """Tests whether an option sets a macro or a setting of a config."""
    option = OPTIONS[name]
    return option.macro in config.macros or option.setting in config.values


def _users(kind: str, name: str) -> str:
    return ", ".join(x for x, file in choices_of(kind).items() if _uses(file, name))


def _check_needed(choice: str, config: ShippedConfig, choices: Choices) -> None:
    """Refuses a config with a value that only an option could give."""
    for option in TABLE:
        needed = option.macro in config.needed and option.default is None
        # A head may have the names of the checkpoint's classes, or be of a number.
        if option.name == "labels" and _uses(config, HEAD):
            continue
        if needed and option.name not in choices:
            typed = f"{option.flag} {option.metavar or ''}"
            raise InputError(f"{choice} needs {typed}: {option.help}")


def default_directory(choices: Choices) -> str:
    """Returns the run directory of a run without `--out`: its model and its method."""
    model = PurePath(choices["model"]).name.rpartition(":")[2]
    plain = re.sub(r"[^\w.+-]+", "-", model).strip(".-") or "model"
    return f"runs/{plain}-{choices.get('method', DEFAULT_METHOD)}"


def choices_in(
    bindings: Sequence[str], *, macros: bool
) -> tuple[dict[str, Any], list[str]]:
    """Separates bindings that name an option, such as `learning_rate = 0.1`.

    Bindings are as gin reads them. With `macros`, macros of the shipped configs name
    options too, such as `LEARNING_RATE`, and unknown names are refused.

    Returns:
      the values by option, and the other bindings.
    """
    names = {name: name for name in OPTIONS}
    if macros:
        names |= {option.macro: option.name for option in TABLE if option.macro}
    files = [file for kind in FOLDERS for file in choices_of(kind).values()]
    others_known = {macro for file in files for macro in file.macros}
    choices, others = {}, []
    for binding in bindings:
        left, _, value = binding.partition("=")
        name = left.strip()
        if name in names:
            text = value.strip()
            option = names[name]
            choices[option] = _as_option(option, literal(text, default=text))
        elif macros and "." not in name and name not in others_known:
            known = [*names, *others_known]
            raise InputError(
                f"there is no setting {shortened(name)}{did_you_mean(name, known)}"
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

    An option sets the macro of its name, if it is among the `macros` of the config, or
    else its parameter. `words` are all words of the config, for messages.
    """
    bindings = []
    for name, value in choices.items():
        option = OPTIONS[name]
        if option.macro in macros:
            bindings.append(f"{option.macro} = {value!r}")
        elif name == "eval":
            bindings += [*EVALUATES, f"{option.setting} = {value!r}"]
        elif option.setting:
            bindings.append(f"{option.setting} = {value!r}")
        else:
            raise InputError(_without_option(name, value, words))
    return bindings


EVALUATES = (
    "Run.evaluation = @Evaluation()",
    "Evaluation.data = @evaluation/DataSource()",
)
"""Bindings of a config without evaluation that let a run evaluate files."""


def _without_option(name: str, value: Any, words: Collection[str]) -> str:
    """Explains what to type instead of an option that a config does not have."""
    option = OPTIONS[name]
    if name in FOLDERS:
        file = choices_of(name).get(value)
        known = f"{FOLDERS[name][0]}/{value}.gin" if file is None else file.name
        return (
            f"{option.flag} {value} is for runs without a config: give the config's "
            f"file after the others, --gin_file {known}"
        )
    way = " or ".join(
        f"--gin.{setting}={value}"
        for setting in sorted(settings_of(option.macro))
        if setting.partition(".")[0] in words
    )
    hint = f", such as {way}" if way else ""
    return (
        f"{option.flag} sets the macro {option.macro}, which the config has not: set "
        f"the parameter of the config by --gin.NAME=value{hint}"
    )
