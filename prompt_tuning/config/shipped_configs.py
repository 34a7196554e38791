"""The gin files that come with the package."""

import difflib
import re
from pathlib import Path

from prompt_tuning.core.config_folder import config_folder
from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError, shortened

FIRST_GROUP = "runs"
"""Folder of the configs that are complete runs; the others are parts of runs."""


def list_configs() -> dict[str, str]:
    """Returns the first sentences of the shipped configs by name, complete runs first.

    Names are as `--gin_file` takes them, such as "runs/first_prompt.gin".
    """
    folder = config_folder()
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gin")]
    names.sort(key=lambda name: (not name.startswith(f"{FIRST_GROUP}/"), name))
    return {name: first_sentence((folder / name).read_text()) for name in names}


def read_config(name: str) -> str:
    """Reads a shipped config; its folder and `.gin` may be left out of the name."""
    names = list(list_configs())
    file = f"{name.removesuffix('.gin')}.gin"
    matches = [other for other in names if file in (other, Path(other).name)]
    if len(matches) != 1:
        near = matches or difflib.get_close_matches(
            file[:MAXIMUM_SHOWN], names, n=3, cutoff=0.5
        )
        expected = " or ".join(near) or "a name that `prompt-tuning configs` lists"
        asked = shortened(name) or "''"
        raise InputError(f"there is no config {asked}; expected {expected}")
    return (config_folder() / matches[0]).read_text()


def first_sentence(config: str) -> str:
    """Returns the first sentence of a config's leading comment, without the period."""
    lines = []
    for line in config.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    # "et al. 2021" does not end a sentence.
    return re.split(r"\.(?:$| (?=[A-Z]))", " ".join(lines))[0]
