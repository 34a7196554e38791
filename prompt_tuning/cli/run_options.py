"""Add the options of `config.flat_options` to commands."""

import argparse
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prompt_tuning.cli import launch
from prompt_tuning.cli.option_types import json_object, numeric
from prompt_tuning.config import flat_option, option_checks
from prompt_tuning.config.config_table import FOLDERS, choices_of, list_rates
from prompt_tuning.config.config_values import CONFIG_FILE, IDENTITY_FILE
from prompt_tuning.config.options import OPTIONS, TABLE
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.training.sweep.best_member import best_member

if TYPE_CHECKING:
    from prompt_tuning.config.parsed_config import GivenConfig

HELP_WIDTH = 79
"""Number of columns of help text that argparse does not wrap."""
TRAINS = flat_option.GROUPS
"""Option groups of a command that opens a run as `train` does."""
EVALUATES = (flat_option.MODEL, flat_option.DATA, flat_option.EVALUATION)
GENERATES = (flat_option.MODEL,)
UNTRAINED = ("train", "prompt_id_key", "eval_every", "keep_best")
"""Options of `EVALUATES` that only matter in training."""


def add_run_options(
    parser: argparse.ArgumentParser, groups: Sequence[str] = TRAINS
) -> None:
    """Adds the options of some groups, with their defaults in the help."""
    names = []
    for group in groups:
        added = parser.add_argument_group(group)
        for option in TABLE:
            if option.group == group and (groups == TRAINS or _is_used(option)):
                added.add_argument(option.flag, **_arguments(option))
                names.append(option.name)
    parser.set_defaults(run_options=names)
    if flat_option.METHOD in groups:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = textwrap.fill(parser.description or "", HELP_WIDTH)
        parser.epilog = (
            f"methods:\n{_list('method')}\n\nlosses:\n{_list('loss')}\n\n"
            f"{textwrap.fill(parser.epilog or '', HELP_WIDTH)}"
        )


def add_table_options(parser, names: Sequence[str]) -> None:
    """Adds single options, with their defaults, to a parser or an option group."""
    for name in names:
        option = OPTIONS[name]
        arguments = {"default": option.default, "help": option.help}
        parser.add_argument(option.flag, **_arguments(option) | arguments)


def _list(option: str) -> str:
    """Lists an option's choices with their help; macros are shown as options."""
    files = choices_of(option)
    width = max(map(len, files)) + 4
    flags = {option.macro: option.flag for option in TABLE if option.macro}
    return "\n".join(
        textwrap.fill(
            re.sub(r"[A-Z_]{4,}", lambda x: flags.get(x[0], x[0]), file.help),
            HELP_WIDTH,
            initial_indent=f"  {name}".ljust(width),
            subsequent_indent=" " * width,
        )
        for name, file in files.items()
    )


def _is_used(option: flat_option.FlatOption) -> bool:
    return option.name not in UNTRAINED


def _arguments(option: flat_option.FlatOption) -> dict[str, Any]:
    """Returns argparse's arguments for an option."""
    arguments: dict[str, Any] = {"help": _help(option), "default": None}
    if option.kind is bool:
        return {**arguments, "action": "store_true"}
    if option.kind is list:
        arguments["nargs"] = "+"
    choices = option.choices
    if option.name in FOLDERS and option.name != "method":
        choices = tuple(choices_of(option.name))
    if choices:
        arguments["choices"] = choices
    if option.metavar or not choices:
        arguments["metavar"] = option.metavar or ("N" if option.is_number else "TEXT")
    return {**arguments, "type": _type(option)}


def _type(option: flat_option.FlatOption) -> Callable[[str], Any]:
    """Returns the function that parses an option's value."""
    if option.kind is dict:
        return json_object
    kind = option.item if option.kind is list else option.kind
    return str if kind in (str, None) else numeric(kind)


def _help(option: flat_option.FlatOption) -> str:
    default = option.default
    if option.name == "learning_rate":
        default = list_rates()
    if default is None or default is False or default == "":
        return option.help
    return f"{option.help} (default: {default})"


def given_choices(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options by name."""
    names = getattr(options, "run_options", ())
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_options(
    options: argparse.Namespace, *, trains: bool, varied: Sequence[str] = ()
) -> None:
    """Checks the options of a command that reads a run, before JAX is imported.

    A config that could be read is kept as `options.checked_config`, for the run.

    Raises:
      InputError: for missing or contradictory options, files that do not exist, and
        configs that cannot be parsed.
    """
    choices = given_choices(options)
    directory = getattr(options, "run", None)
    if trains and directory is not None and (options.gin_file or "out" in choices):
        config = shlex.quote(f"{directory}/{CONFIG_FILE}")
        raise InputError(
            f"--run {directory} continues that run in its directory; to start another "
            f"run from its config, give --gin_file {config} --out DIRECTORY instead"
        )
    # Several processes report a mistake in files together, and modules may need JAX.
    left = options.allow_gin_imports or launch.is_one_of_several(options)
    if left and directory is not None:
        return
    config = given_config(options, varied, trains=trains)
    if left:
        return
    # A config may be printed before its files exist.
    option_checks.check_values(
        {**config.given, "epochs": config.epochs},
        paths=not getattr(options, "print_config", False),
    )
    options.checked_config = config, config.read()


class OptionsConfig(NamedTuple):
    """The config that a command's options describe.

    Attributes:
      files: gin files.
      bindings: the user's bindings.
      choices: options that override the files.
      defaults: bindings that override the files, from options without a config.
      given: all given options except `epochs`.
      epochs: number of epochs, if given instead of steps.
    """

    files: list[str]
    bindings: list[str]
    choices: dict[str, Any]
    defaults: list[str]
    given: dict[str, Any]
    epochs: int | float | None

    def read(self, *, allow_imports: bool = False) -> "GivenConfig":
        """Reads the files and checks them; see `gin_files.read_run`."""
        from prompt_tuning.config.parsed_config import GivenConfig

        return GivenConfig.read(
            self.files,
            self.bindings,
            choices=self.choices,
            defaults=self.defaults,
            allow_imports=allow_imports,
        )


def given_config(
    options: argparse.Namespace,
    bindings: Sequence[str] = (),
    directory: str | None = None,
    *,
    trains: bool,
    steps: int | None = None,
) -> OptionsConfig:
    """Returns the config of `--run`, of the gin files, or of the options alone.

    `directory` overrides the config's; `steps` is the number of steps of the given
    epochs.
    """
    from prompt_tuning.config.flat_config import flat_config, frozen_config

    files, run = list(options.gin_file), getattr(options, "run", None)
    model = given_model(options, trains=trains)
    named, others = option_checks.choices_in(
        [*options.bindings, *bindings], macros=model is not None
    )
    choices = {**(model or {}), **given_choices(options), **named}
    # The number of its steps is not known before the data are read.
    epochs = choices.pop("epochs", None)
    bound = {binding.partition("=")[0].strip() for binding in others}
    length = OPTIONS["steps"]
    if epochs is not None and (
        "steps" in choices or bound & {length.setting, length.macro}
    ):
        raise InputError(
            "--epochs and --steps both set the length of the run: leave one of them out"
        )
    if steps is not None:
        choices["steps"] = steps
    if model is not None:
        if trains:
            flat = flat_config(choices, others, directory, files)
        else:
            flat = frozen_config(choices, others)
        return OptionsConfig(flat.files, others, {}, flat.lines, choices, epochs)
    if run is not None:
        files = [str(find_run_directory(run) / CONFIG_FILE), *files]
    return OptionsConfig(files, others, choices, [], choices, epochs)


def given_model(options: argparse.Namespace, *, trains: bool) -> dict[str, str] | None:
    """Returns the option `model` in the gin files, if options configure the rest.

    Returns an empty dict without gin files; None if files or a run directory configure
    the run.
    """
    if getattr(options, "run", None) is not None:
        return None
    if not options.gin_file:
        return {}
    if not trains:
        return None
    from prompt_tuning.config.parsed_config import model_in_files

    return model_in_files(options.gin_file)


def find_run_directory(name: str) -> Path:
    """Returns a run directory; for a sweep, that of its best member.

    Raises:
      InputError: if it is not a run directory.
    """
    directory = best_member(Path(name)) or Path(name)
    if not (directory / CONFIG_FILE).exists():
        raise InputError(f"{directory} is not a run directory: it has no {CONFIG_FILE}")
    check_links(directory, CONFIG_FILE, IDENTITY_FILE)
    return directory
