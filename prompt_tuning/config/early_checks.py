"""Checks of a config before JAX is imported, which takes seconds.

They are the checks that `gin_files.read_run` repeats, and those of the paths that a run
reads. Most mistakes on the command line are found here.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.factory_outlines import outline
from prompt_tuning.config.gin_values import known_value, replace_macros
from prompt_tuning.config.operative_config import (
    Values,
    check_used,
    complete_values,
    unused_bindings,
)
from prompt_tuning.config.option_checks import Choices
from prompt_tuning.config.parsed_config import GivenConfig, registered
from prompt_tuning.data.rows.data_files import contains_text
from prompt_tuning.pretrained.checkpoint_path import check_checkpoint

PATHS: Mapping[str, Callable[[Any], object]] = {
    "Pretrained.checkpoint": check_checkpoint,
    "DataSource.files": contains_text,
}
"""Checks of the paths that factories are given, in this order."""


def check_config(
    files: Sequence[str],
    bindings: Sequence[str],
    *,
    choices: Choices | None = None,
    defaults: Sequence[str] = (),
    omitted: Collection[str] = (),
    allow_unused: bool = False,
) -> None:
    """Checks the names, types and paths in a config.

    Args:
      files: gin files.
      bindings: bindings that override them.
      choices: options that override them too.
      defaults: see `read_run`.
      omitted: fields of `Run` that the command does not use, such as "data".
      allow_unused: see `read_run`.

    Raises:
      InputError: for the first mistake.
    """
    with _parsed(files, bindings, choices, defaults):
        if not allow_unused:
            check_used(unused_bindings(bindings))
        values = complete_values(omitted)
        for parameter, check in PATHS.items():
            for path in _bound(values, *parameter.split(".")):
                check(path)


def check_paths(values: Mapping[str, Any]) -> None:
    """Checks paths from options.

    Args:
      values: values by parameter, such as "train/DataSource.files".

    Raises:
      InputError: for the first path that cannot be used.
    """
    for parameter, check in PATHS.items():
        for name, value in values.items():
            if name.rpartition("/")[2] == parameter:
                check(value)


def read_values(files: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the values of a config by factory and parameter, for display.

    If more than one scope configures a factory, the values of one count. References are
    kept.

    Raises:
      InputError: if the config cannot be read.
    """
    with _parsed(files, ()):
        return {
            selector.rpartition(".")[2]: {
                name: replace_macros(value, scope) for name, value in parameters.items()
            }
            for (scope, selector), parameters in complete_values().items()
        }


@contextlib.contextmanager
def _parsed(
    files: Sequence[str],
    bindings: Sequence[str],
    choices: Choices | None = None,
    defaults: Sequence[str] = (),
) -> Iterator[None]:
    """Parses a config with outlines, which are registered while the context lasts."""
    config = GivenConfig.read(
        files, bindings, choices=choices, defaults=defaults, allow_imports=False
    )
    named = FACTORIES.keys() & config.sources.words | {"Run"}
    factories = {name: outline(name) for name in sorted(named)}
    with registered(factories):
        config.parse(factories)
        yield


def _bound(values: Values, factory: str, parameter: str) -> Iterator[Any]:
    """Yields the values of a factory's parameter in all scopes."""
    for (scope, selector), parameters in values.items():
        if selector.rpartition(".")[2] == factory:
            value = known_value(parameters.get(parameter), scope)
            if value is not None:
                yield value
