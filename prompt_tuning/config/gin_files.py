"""Reads runs from gin files.

The factories that a config can bind are plain dataclasses, classes and functions of the
package. gin calls a factory to build the object that the config describes.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gin

from prompt_tuning.config.config_values import CONFIG_FILE, IDENTITY_FILE
from prompt_tuning.config.deferred_factories import factory_signature
from prompt_tuning.config.factories import import_factories
from prompt_tuning.config.operative_config import check_used, unused_bindings
from prompt_tuning.config.option_checks import Choices
from prompt_tuning.config.parsed_config import GivenConfig, explained, register
from prompt_tuning.config.run import Run
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.private_parts import private_part
from prompt_tuning.prompts.prompt_module import PromptFactory, PromptModule


@functools.cache
def prompt_names() -> frozenset[str]:
    """Returns the names of prompt classes, which a run calls with its vocabulary."""
    return frozenset(
        name
        for name, factory in import_factories().items()
        if "vocabulary" in factory_signature(factory).parameters
    )


@functools.cache
def register_factories() -> None:
    """Registers the package's factories with gin, once."""
    register(import_factories())


def read_run(
    files: Sequence[str],
    bindings: Sequence[str],
    directory: str | None = None,
    *,
    choices: Choices | None = None,
    defaults: Sequence[str] = (),
    allow_imports: bool = False,
    allow_unused: bool = False,
) -> Run:
    """Parses gin files and bindings, and builds the run that they describe.

    Args:
      files: paths, or names below `configs/` such as "runs/first_prompt.gin".
      bindings: bindings such as `Run.steps = 10`, which override the files.
      directory: directory of the run, which overrides the config's.
      choices: options such as `{"steps": 10}`, which override the files too.
      defaults: bindings that `bindings` override, and that the run may leave unused.
      allow_imports: whether the config may import modules, which runs their code.
      allow_unused: whether bindings may set parameters that the run does not use.

    Raises:
      InputError: if the config cannot be used; the message names the file or binding.
    """
    config = GivenConfig.read(
        files,
        bindings,
        choices=choices,
        defaults=defaults,
        allow_imports=allow_imports,
    )
    return build_run(config, directory, allow_unused=allow_unused)


def build_run(
    config: GivenConfig, directory: str | None = None, *, allow_unused: bool = False
) -> Run:
    """Builds the run of a config that was read; see `read_run`."""
    register_factories()
    run: Run = config.build(import_factories(), directory)
    if not allow_unused:
        check_used(unused_bindings(config.bindings))
    return dataclasses.replace(
        run,
        prompt=run.prompt and _Explained(run.prompt),
        decoder_prompt=run.decoder_prompt and _Explained(run.decoder_prompt),
    )


def read_run_directory(
    directory: Path,
    bindings: Sequence[str] = (),
    files: Sequence[str] = (),
    *,
    choices: Choices | None = None,
    allow_imports: bool = False,
) -> Run:
    """Reads the run of a directory by its config, which the arguments override.

    For the arguments see `read_run`.
    """
    check_links(directory, CONFIG_FILE, IDENTITY_FILE)
    config = str(directory / CONFIG_FILE)
    run = read_run(
        [config, *files], bindings, choices=choices, allow_imports=allow_imports
    )
    # The directory may have been moved since the run wrote its config.
    return dataclasses.replace(run, directory=str(directory))


@contextlib.contextmanager
def keeping_config() -> Iterator[None]:
    """Keeps gin's config while another run is read and its prompts are built."""
    names = ("_CONFIG", "_OPERATIVE_CONFIG", "_IMPORTS")
    parts = [private_part(f"gin.config.{name}") for name in names]
    kept = [copy.copy(part) for part in parts]
    try:
        yield
    finally:
        gin.clear_config()
        for part, before in zip(parts, kept, strict=True):
            part.update(before)


@dataclasses.dataclass(frozen=True)
class _Explained:
    """A prompt's factory; turns its errors into an `InputError`."""

    factory: PromptFactory

    @property
    def keywords(self) -> dict[str, Any]:
        """The bound initializer, named as in a `functools.partial`."""
        try:
            name = f"{self.factory.__name__}.initializer"
            return {"initializer": gin.query_parameter(name)}
        except ValueError:
            return {}

    def __call__(self, *arguments: Any) -> PromptModule:
        # Other errors are not caused by the config.
        with explained("the config's prompt", (ValueError, TypeError)):
            return self.factory(*arguments)
