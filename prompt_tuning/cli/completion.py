"""Shell completion of commands, options and values, by argcomplete."""

import argparse
import os
from collections.abc import Callable, Iterable

from prompt_tuning.cli.option_types import find_subparsers
from prompt_tuning.config.config_table import choices_of
from prompt_tuning.config.shipped_configs import list_configs
from prompt_tuning.core.private_parts import options_of

REQUESTED = "_ARGCOMPLETE"
"""Variable that the shell sets when it asks for completions."""


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and exits, if it asks for completions."""
    if REQUESTED not in os.environ:
        return
    import argcomplete

    for command, subparser in find_subparsers(parser).items():
        _add_completers(command, subparser)
    argcomplete.autocomplete(parser)


def _add_completers(command: str, parser: argparse.ArgumentParser) -> None:
    """Adds the values of options; argcomplete completes all others as files."""
    names: dict[str, Callable[[str], Iterable[str]]] = {"gin_file": _configs_and_files}
    if command == "configs":
        names["name"] = lambda _: list_configs()
    if parser.get_default("run_options") is not None:
        names["method"] = lambda _: choices_of("method")
        names["loss"] = lambda _: choices_of("loss")
    for action in options_of(parser):
        if action.dest in names:
            # argcomplete reads this attribute, and passes additional arguments by name.
            setattr(action, "completer", _completer(names[action.dest]))  # noqa: B010


def _completer(names: Callable[[str], Iterable[str]]) -> Callable[..., list[str]]:
    return lambda prefix, **_: list(names(prefix))


def _configs_and_files(prefix: str) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*list_configs(), *FilesCompleter(("gin",))(prefix)]
