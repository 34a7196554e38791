"""The values of a recorded config, read without building what it describes."""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.config.parsed_config import GivenConfig


def read_values(file: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the values of a config by factory and parameter, for display.

    If more than one scope configures a factory, the values of one count. References are
    kept as the config writes them.
    """
    return GivenConfig.read([file], (), allow_imports=False).sources.by_factory()
