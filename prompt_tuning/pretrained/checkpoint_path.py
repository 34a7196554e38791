"""Finds a frozen model by the name that a config or a command gives it."""

import re
from pathlib import Path

from prompt_tuning.core.errors import InputError, shortened

BUNDLED = Path(__file__).parents[1] / "bundled"
BUNDLED_PREFIX = "bundled:"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")
"""Suffixes of files that a model's folder has."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_checkpoint(name: str) -> Path:
    """Returns the path of a checkpoint.

    Args:
      name: path of a Hugging Face folder or a T5X checkpoint, or `bundled:` and the
        name of a bundled model.

    Raises:
      InputError: if there is none, or the path is one of its files.
    """
    if name.startswith(BUNDLED_PREFIX):
        return _find_bundled(name.removeprefix(BUNDLED_PREFIX))
    path = Path(name)
    if path.is_file() and path.suffix in WEIGHTS:
        raise InputError(f"{path} is a file of a model; give its folder, {path.parent}")
    if path.exists():
        return path
    problem = f"{shortened(name)} does not exist"
    if _HUB_ID.fullmatch(name):
        folder = path.name
        raise InputError(
            f"{problem}; if it is a model of the Hugging Face hub, download it by "
            f"`hf download {name} --local-dir {folder}` and give the folder {folder}"
        )
    raise InputError(f"{problem}; expected a Hugging Face folder or a T5X checkpoint")


def _find_bundled(name: str) -> Path:
    if not (BUNDLED / name).is_dir():
        names = sorted(folder.name for folder in BUNDLED.glob("*-*"))
        raise InputError(
            f"no model {shortened(name)!r} is bundled; available: {', '.join(names)}"
        )
    return BUNDLED / name
