"""Finds a frozen model by its name in a config or a command."""

from pathlib import Path

from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.gguf_files import SUFFIX
from prompt_tuning.pretrained.hub_name import HubName, parse_hub_name

BUNDLED = Path(__file__).parents[1] / "bundled"
BUNDLED_PREFIX = "bundled:"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".json")
"""Suffixes of files that a model's folder has."""


def find_checkpoint(name: str) -> Path:
    """Returns the path of a checkpoint; downloads a model from the hub.

    Args:
      name: path of a Hugging Face folder, a GGUF file, a folder with one, or a T5X
        checkpoint; `bundled:` and the name of a bundled model; or the name of a model
        on the Hugging Face hub, e.g. "Qwen/Qwen3-0.6B", optionally with a revision
        after `@`. If a name is also a path, the path wins.

    Raises:
      InputError: if there is none, or the path is one of its files.
    """
    hub_name = hub_name_of(name)
    if hub_name is None:
        return _find_local(name)
    from prompt_tuning.pretrained import hub

    return hub.find_folder(hub_name)


def check_checkpoint(name: str) -> None:
    """Checks a checkpoint's name without downloading anything.

    Raises:
      InputError: if there is none, or a model on the hub cannot be downloaded.
    """
    hub_name = hub_name_of(name)
    if hub_name is None:
        _find_local(name)
    else:
        from prompt_tuning.pretrained import hub

        hub.check_available(hub_name)


def hub_name_of(name: str) -> HubName | None:
    """Returns the hub model that a checkpoint's name stands for, or None."""
    hub_name = parse_hub_name(name)
    return None if hub_name is None or Path(name).exists() else hub_name


def _find_local(name: str) -> Path:
    if name.startswith(BUNDLED_PREFIX):
        return _find_bundled(name.removeprefix(BUNDLED_PREFIX))
    path = Path(name)
    if path.is_file() and path.suffix in WEIGHTS:
        raise InputError(f"{path} is a file of a model; give its folder, {path.parent}")
    if path.is_dir():
        return _find_gguf(path) or path
    if path.exists():
        return path
    raise InputError(
        f"{shortened(name)} does not exist; expected a Hugging Face folder, a "
        "GGUF file, a T5X checkpoint, or the name of a model of the Hugging Face hub"
    )


def _find_gguf(folder: Path) -> Path | None:
    """Returns the GGUF file in a folder without other weights, or None."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    check_links(folder, f"*{SUFFIX}")
    if len(files) > 1:
        names = shortened(", ".join(file.name for file in files))
        raise InputError(
            f"{folder} has {len(files)} GGUF files, expected one: give the path of one "
            f"of {names}"
        )
    return files[0]


def _find_bundled(name: str) -> Path:
    if not (BUNDLED / name).is_dir():
        names = sorted(folder.name for folder in BUNDLED.glob("*-*"))
        raise InputError(
            f"no model {shortened(name)!r} is bundled; available: {', '.join(names)}"
        )
    return BUNDLED / name
