"""Finds the files of a recorded config from any working directory.

Relative paths in the config of a run start at the directory where it was trained; the
first line of the config records it. If the run directory was moved together with its
data, the files are found at the same place relative to the run directory.
"""

import dataclasses
import glob
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gin import config as gin_config

from prompt_tuning.config.config_values import (
    CONFIG_FILE,
    IDENTITY_FILE,
    config_values,
    literal,
    resolved,
)
from prompt_tuning.config.data_parser import is_text
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.core.private_parts import private_part
from prompt_tuning.core.typed_json import parse_json, read_limited

HEADER = "# Relative paths start at "
DIRECTORY, FILES = "Run.directory", "DataSource.files"
PATHS = (
    *("Pretrained.checkpoint", "Pretrained.tokenizer"),
    *(FILES, "DataSource.chat_template", "Evaluation.category_names"),
    *("Run.start_from", "from_file.path", "OutputGradients.files"),
    *("DPO.reference", "KTO.reference", "GRPO.reference"),
    *("ContextDistillation.contexts", "OnPolicyDistillation.contexts"),
)
"""Settings whose texts are paths. The items of a list are paths of `SEVERAL` alone."""
SEVERAL = (FILES, "from_file.path", "OutputGradients.files")
"""Those of them that are lists, or dicts whose values are paths."""


def with_header(config: str) -> str:
    """Returns a config that records where its relative paths start."""
    return f"{HEADER}{json.dumps(str(Path.cwd()))}\n{config}"


@dataclasses.dataclass(frozen=True)
class RecordedPaths:
    """Where the relative paths of a run's config start.

    Attributes:
      directory: the run directory, wherever it is now.
      recorded: the run directory that the config names.
      origin: working directory of the training; None if unknown.
    """

    directory: Path
    recorded: Path
    origin: Path | None

    @classmethod
    def read(
        cls, directory: Path, config: str, recorded: str | None = None
    ) -> "RecordedPaths":
        """Reads where the paths of the config in a run directory start.

        `recorded` is the run directory that the config names; None to look it up.
        """
        origin = None
        first = config.partition("\n")[0]
        if first.startswith(HEADER):
            text = first.removeprefix(HEADER)
            value = parse_json(text, f"the first line of {directory / CONFIG_FILE}")
            origin = Path(value) if isinstance(value, str) else None
        if recorded is None:
            value = literal(resolved(config_values(config), DIRECTORY))
            recorded = value if isinstance(value, str) else ""
        return cls(directory.absolute(), Path(recorded), origin)

    def locate(self, path: str) -> str:
        """Returns a path to a file of the config from here.

        It is the same path if it leads to the same file, or no other file is found.
        """
        for candidate in map(str, self._candidates(Path(path))):
            if _exists(candidate):
                same = os.path.realpath(candidate) == os.path.realpath(path)
                return path if same else candidate
        return path

    def _candidates(self, path: Path) -> list[Path]:
        """Returns paths where a file may be, the likeliest first."""
        if not path.is_absolute():
            bases = filter(None, (self._moved, self.origin))
            return [_normalized(base / path) for base in bases]
        moves = ((self._before, self.directory), (self.origin, self._moved))
        return [
            path,
            *(
                now / path.relative_to(before)
                for before, now in moves
                if before and now and path.is_relative_to(before)
            ),
        ]

    @property
    def _before(self) -> Path | None:
        """The run directory at the time of its training."""
        if self.origin is not None:
            return _normalized(self.origin / self.recorded)
        return self.recorded if self.recorded.is_absolute() else None

    @property
    def _moved(self) -> Path | None:
        """The working directory of the training, moved as the run directory was."""
        if self.origin is not None and self._before is not None:
            way = os.path.relpath(self.origin, self._before)
            return _normalized(self.directory / way)
        # A run of an earlier version, which did not record its working directory.
        parts = _normalized(self.recorded).parts
        if self.recorded.is_absolute() or ".." in parts:
            return None
        ends = self.directory.parts[-len(parts) :] == parts
        return self.directory.parents[len(parts) - 1] if ends else None


def is_run_config(file: str) -> bool:
    """Tests whether a file is the config that a run wrote to its directory."""
    path = Path(file)
    return path.name == CONFIG_FILE and (path.parent / IDENTITY_FILE).is_file()


def locate_in_gin(file: str) -> None:
    """Locates the paths of a config that gin has just parsed, if it is a run's."""
    directory = Path(file).parent
    if not is_run_config(file):
        return
    holders = value_holders(lambda name: is_path(name) or name == DIRECTORY)
    recorded = [owner[key] for name, owner, key in holders if name == DIRECTORY]
    if not recorded or not isinstance(recorded[0], str):
        return
    config = read_limited(Path(file), MAXIMUM_BYTES).decode()
    paths = RecordedPaths.read(directory, config, recorded[0])
    for name, owner, key in holders:
        if name != DIRECTORY:
            owner[key] = _each_text(owner[key], paths.locate)
        elif os.path.realpath(owner[key]) != os.path.realpath(directory):
            owner[key] = str(directory)


def value_holders(
    chosen: Callable[[str], bool],
) -> list[tuple[str, dict[str, Any], str]]:
    """Returns where gin keeps the values of chosen settings: name, dict and key.

    The values are texts, or lists of `SEVERAL`.
    """
    holders = []
    values = private_part("gin.config._CONFIG")
    for (_, selector), parameters in values.items():
        for key, value in parameters.items():
            name = f"{selector.rpartition('.')[2]}.{key}"
            if not chosen(name):
                continue
            owner = parameters
            if isinstance(value, gin_config.ConfigurableReference):
                # A macro: the setting may still be overridden by its name.
                owner, key = values.get(value.config_key, {}), "value"
            # The names of categories are a list, or a file that contains them.
            single = isinstance(owner.get(key), str)
            if single or (key in owner and name in SEVERAL):
                holders.append((name, owner, key))
    return holders


def locate_text(value: str, locate: Callable[[str], str]) -> str:
    """Returns the value of a path setting, as a config writes it, with located paths.

    The value is a text, a list of texts, or anything else, which does not change.
    """
    parsed = literal(value)
    if parsed is None:
        return value
    return repr(_each_text(parsed, lambda path: os.path.realpath(locate(path))))


def is_path(name: str) -> bool:
    """Tests whether the texts of a setting are paths."""
    return name.rpartition("/")[2] in PATHS


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Changes a text, or each text of a list or among the values of a dict."""
    if isinstance(value, str):
        return change(value) if is_text(value) else value
    if isinstance(value, list | tuple):
        return type(value)(_each_text(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _each_text(item, change) for key, item in value.items()}
    return value


def _normalized(path: Path) -> Path:
    return Path(os.path.normpath(path))


def _exists(path: str) -> bool:
    # Unlike those of `pathlib`, these functions raise nothing.
    if os.path.exists(path):  # noqa: PTH110
        return True
    return glob.has_magic(path) and bool(glob.glob(path))  # noqa: PTH207
