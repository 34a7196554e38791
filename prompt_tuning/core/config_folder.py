"""Finds the shipped gin files, and the factories with the same names.

Thus a new prompt or loss needs only a module and a gin file with the same name.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from prompt_tuning.core.errors import InputError

PACKAGE = Path(__file__).parents[1]
# A wheel has the configs inside the package, a checkout next to it.
CONFIG_FOLDERS = (PACKAGE / "configs", PACKAGE.parent / "configs")


def config_folder() -> Path:
    """Returns the folder of the shipped configs.

    Raises:
      InputError: if there is none.
    """
    for folder in CONFIG_FOLDERS:
        if folder.is_dir():
            return folder
    folders = " or ".join(map(str, CONFIG_FOLDERS))
    raise InputError(f"there are no configs in {folders}; install the package again")


def with_configured(
    listed: Mapping[str, str], room: str, folders: Collection[str]
) -> dict[str, str]:
    """Adds the factories of modules that have a config with the same name.

    The factory is the class or function that the module defines and the config names,
    e.g. `ScaledPrompt` for `prompts/scaled.py` and `configs/prompts/scaled.gin`.

    Args:
      listed: the module of each factory that is already known.
      room: folder of the modules, e.g. "prompts".
      folders: folders of the configs, e.g. "prompts" and "adapters".

    Returns:
      the module of each factory, by name.
    """
    known = {module.rpartition(".")[2] for module in listed.values()}
    found = dict(listed)
    for path in sorted(PACKAGE.joinpath(room).glob("*.py")):
        for folder in folders:
            config = config_folder() / folder / f"{path.stem}.gin"
            if path.stem in known or not config.is_file():
                continue
            named = re.findall(r"@(?:\w+/)*(\w+)", config.read_text("utf-8"))
            source = path.read_text("utf-8")
            defined = re.findall(r"^(?:class|def) (\w+)", source, re.MULTILINE)
            module = f"prompt_tuning.{room}.{path.stem}"
            found |= dict.fromkeys(set(named) & set(defined), module)
    return found
