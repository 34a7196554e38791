"""The option `--adapter NAME=PATH`, for commands that load adapters."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown


def add_adapter_option(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds `--adapter NAME=PATH`."""
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"an adapter that {purpose}: a run directory, a checkpoint, a PEFT folder "
        "or a prompt file; may be repeated",
    )


def named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Returns the paths of adapters by name, given as `NAME=PATH`.

    Raises:
      InputError: if an option is malformed, a name is given twice, or a path does not
        exist.
    """
    adapters = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"--adapter is {shown(text)}, expected NAME=PATH")
        if name in adapters:
            raise InputError(f"--adapter names {shown(name)} more than once")
        if not Path(path).exists():
            raise InputError(f"--adapter {name}: {shown(path)} does not exist")
        adapters[name] = Path(path)
    return adapters
