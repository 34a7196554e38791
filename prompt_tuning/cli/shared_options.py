"""Options shared by commands, e.g. `--run`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.checkpoint_path import BUNDLED_PREFIX, find_checkpoint

EPILOG = (
    "Override any other value with --gin.NAME=value, for example "
    "--gin.Run.keep_last=5 or --gin.Prompting.placement='\"suffix\"'."
)
OTHER_PROMPT = (
    "a prompt file, checkpoint or PEFT folder to use instead of the run's best "
    "checkpoint"
)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--gin_file`."""
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file, by path or by its name below configs/ (`prompt-tuning "
        "configs` lists them); may be repeated",
    )
    add_imports_option(parser)
    parser.epilog = EPILOG


def add_tokenizer_option(
    parser: argparse.ArgumentParser, note: str = "", *, required: bool = False
) -> None:
    """Adds `--tokenizer` and its alias `--model`."""
    parser.add_argument(
        "--tokenizer",
        "--model",
        type=_tokenizer_path,
        required=required,
        metavar="PATH",
        help="a file, the folder of a checkpoint, or a bundled model such as "
        f"bundled:skills-decoder{note}",
    )


def _tokenizer_path(name: str) -> str:
    """Returns the path of a tokenizer, or of a bundled model's."""
    if not name.startswith(BUNDLED_PREFIX):
        return name
    try:
        return str(find_checkpoint(name))
    except InputError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def add_imports_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--allow_gin_imports`."""
    parser.add_argument(
        "--allow_gin_imports",
        action="store_true",
        help="let the config import Python modules, e.g. with your own factories; "
        "this runs their code, so use it only with configs that you trust like a "
        "program",
    )


def add_print_config_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--print_config`."""
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print the operative config, defaults included, and exit before any "
        "checkpoint is read",
    )


def add_dry_run_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--dry_run`."""
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check the config, read the model and the data, print the report, and "
        "exit before the first step; nothing is written",
    )


def add_run_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--run`."""
    parser.add_argument(
        "--run",
        metavar="DIRECTORY",
        help="a run directory: short for --gin_file DIRECTORY/config.gin; for a "
        "sweep's directory, its best member",
    )


def add_prompt_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--prompt`."""
    parser.add_argument("--prompt", type=Path, metavar="PATH", help=OTHER_PROMPT)


def check_folder(option: str, file: Path) -> None:
    """Checks that the folder of a file to write exists.

    Raises:
      InputError: if it does not.
    """
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: the folder {file.parent} does not exist")


def refuse_bindings(options: argparse.Namespace) -> None:
    """Raises an error for `--gin.NAME=value` in a command that reads no config.

    Raises:
      InputError: if there are bindings.
    """
    if options.bindings:
        raise InputError(
            f"{options.command} does not read a config, so {options.bindings} has no "
            "effect"
        )


def add_model_and_output(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds `--model` and the output option, with `output` as its help."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="Hugging Face folder, bundled model, or a model of the hub",
    )
    add_output(parser, output)


def add_output(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds the directory to write to, with `output` as its help."""
    parser.add_argument(
        "--out", "--output", required=True, type=Path, metavar="DIR", help=output
    )


Number = tuple[Any, int | float | None, str]
"""Type, default and help of a numeric option."""


def add_numbers(parser: argparse.ArgumentParser, numbers: Mapping[str, Number]) -> None:
    """Adds numeric options by name."""
    for name, (kind, default, text) in numbers.items():
        parser.add_argument(
            f"--{name}", type=numeric(kind), default=default, metavar="N", help=text
        )
