"""Adds the options of `core.flat_options` to the commands."""

import argparse
import shlex
from collections.abc import Sequence
from typing import Any

from prompt_tuning.cli.option_types import integer, number
from prompt_tuning.config.flat_choices import (
    check_frozen,
    check_training,
    choices_in,
)
from prompt_tuning.config.methods import list_methods, list_rates
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.flat_options import (
    DATA,
    EVALUATION,
    GROUPS,
    METHOD,
    MODEL,
    TABLE,
    FlatOption,
    list_losses,
)

CONFIG_FILE = "config.gin"
TRAINS = GROUPS
"""Groups of options of a command that opens a run as `train` does."""
EVALUATES = (MODEL, DATA, EVALUATION)
GENERATES = (MODEL,)
UNTRAINED = ("train", "prompt_id_key", "eval_every")
"""Options of `EVALUATES` that only training has a use for."""

_TYPES: dict[type, Any] = {int: integer, float: number, str: str, list: str}


def add_run_options(
    parser: argparse.ArgumentParser, groups: Sequence[str] = TRAINS
) -> None:
    """Adds the options of some groups, with their defaults in help."""
    names = []
    for group in groups:
        added = parser.add_argument_group(group)
        for option in TABLE:
            if option.group == group and (groups == TRAINS or _is_used(option)):
                added.add_argument(option.flag, **_arguments(option))
                names.append(option.name)
    parser.set_defaults(run_options=names)
    if METHOD in groups:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = (
            f"methods:\n{list_methods()}\n\nlosses:\n{list_losses()}\n\n"
            f"{parser.epilog or ''}"
        )


def _is_used(option: FlatOption) -> bool:
    return option.name not in UNTRAINED


def _arguments(option: FlatOption) -> dict[str, Any]:
    """Returns the arguments by which argparse adds an option."""
    arguments: dict[str, Any] = {"help": _help(option), "default": None}
    if option.kind is bool:
        return {**arguments, "action": "store_true"}
    if option.kind is list:
        arguments["nargs"] = "+"
    if option.choices:
        arguments["choices"] = option.choices
    if option.metavar or not option.choices:
        arguments["metavar"] = option.metavar or ("N" if option.kind is int else "TEXT")
    return {**arguments, "type": _TYPES[option.kind]}


def _help(option: FlatOption) -> str:
    default = option.default
    if option.name == "learning_rate":
        default = list_rates()
    if default is None or default is False:
        return option.help
    return f"{option.help} (default: {default})"


def given_choices(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options that were given, by name."""
    names = getattr(options, "run_options", ())
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_options(options: argparse.Namespace, *, trains: bool) -> None:
    """Checks the options of a run without a config, before JAX is imported.

    Args:
      options: parsed options of the command.
      trains: see `selected_run.read_run`.

    Raises:
      InputError: for options that are missing or contradict each other.
    """
    choices = given_choices(options)
    directory = getattr(options, "run", None)
    if directory is None and not options.gin_file:
        choices |= choices_in(options.bindings, macros=True)[0]
        (check_training if trains else check_frozen)(choices)
    elif trains and directory is not None and (options.gin_file or "out" in choices):
        config = shlex.quote(f"{directory}/{CONFIG_FILE}")
        raise InputError(
            f"--run {directory} continues that run in its directory; to start another "
            f"run from its config, give --gin_file {config} --out DIRECTORY instead"
        )
