"""A PEFT adapter's folder: its settings and its arrays, read and written.

    adapter_config.json         settings: JSON, indented by 2, keys sorted
    adapter_model.safetensors   float32 arrays, with the metadata {"format": "pt"}

The format is that of PEFT 0.21 (`save_pretrained`), byte for byte; older releases leave
settings out. What the arrays mean is `checkpoints.peft`'s business.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from prompt_tuning.adapters.peft.shape_checks import check_shapes
from prompt_tuning.checkpoints.formats.safetensors import read_header
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
README = "README.md"


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """What a PEFT adapter's folder holds.

    Attributes:
      settings: all of `adapter_config.json`, keys that nobody knows among them.
      tensors: float32 arrays by PEFT's names.
    """

    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def kind(self) -> str:
        """PEFT's name of the method, such as "LORA"."""
        return self.settings["peft_type"]


def find_folder(path: Path | str) -> Path | None:
    """The folder that has the adapter's files, or None.

    PEFT puts an adapter whose name is not "default" into a folder of that name.

    Raises:
      InputError: if several adapters lie below.
    """
    path = Path(path)
    if _holds_adapter(path):
        return path
    if not path.is_dir():
        return None
    below = [child for child in sorted(path.iterdir()) if _holds_adapter(child)]
    if len(below) > 1:
        names = ", ".join(str(child) for child in below)
        raise InputError(f"{path} holds several adapters, name one of them: {names}")
    return below[0] if below else None


def read_folder(path: Path | str) -> AdapterFolder:
    """Reads an adapter of any kind.

    Args:
      path: the folder, or the one above it for an adapter with a name.

    Raises:
      InputError: if a file is missing, damaged, a pickle, or its arrays have not the
        shapes that the settings say.
    """
    folder = find_folder(path)
    if folder is None:
        raise InputError(f"{path} holds no {CONFIG}, so it is no PEFT adapter's folder")
    settings = _read_settings(folder / CONFIG)
    file = folder / TENSORS
    if not file.is_file():
        raise InputError(
            f"{file} is missing; {PICKLE}, if there, is a pickle, which could run "
            "anything: save the adapter again with safe_serialization=True"
        )
    tensors = {}
    for name, stored in read_header(file).items():
        if stored.dtype.kind != "f" and stored.dtype.name != "bfloat16":
            raise InputError(
                f"{file}: {name} is {stored.dtype}, expected floating numbers"
            )
        tensors[name] = stored.read().astype(np.float32)
        if not np.isfinite(tensors[name]).all():
            raise InputError(f"{file}: {name} holds numbers that are not finite")
    check_shapes(settings, tensors, str(folder))
    return AdapterFolder(settings, tensors)


def write_folder(
    path: Path | str, folder: AdapterFolder, *, force: bool = False
) -> None:
    """Writes an adapter's two files; an unfinished folder is never seen.

    Args:
      path: the folder; its model card, if there is one, is kept.
      folder: what to write.
      force: whether an adapter that is there already is replaced.

    Raises:
      InputError: if something else is there, or the arrays have not the shapes that
        the settings say. Nothing has been written then.
    """
    path = Path(path)
    check_shapes(folder.settings, folder.tensors, f"the adapter for {path}")
    contents = {
        CONFIG: json.dumps(folder.settings, indent=2, sort_keys=True).encode(),
        TENSORS: _encoded(folder.tensors),
    }
    card = path / README
    if card.is_file():
        contents[README] = card.read_bytes()

    def write(directory: Path) -> None:
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    atomic_files.write_folder(path, write, known=(CONFIG, TENSORS, README), force=force)


def _encoded(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a safetensors file.

    Raises:
      InputError: for an array that is not float32.
    """
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise InputError(f"{name} is {array.dtype}, expected float32")
    # safetensors would write the memory of a view as it lies.
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return save(whole, metadata={"format": "pt"})


def _holds_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, TENSORS, PICKLE))


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of an adapter of any kind.

    Raises:
      InputError: if they are missing, not JSON, or do not say their kind.
    """
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing beside the adapter") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        raise InputError(f"{path} has no 'peft_type', so it is no PEFT adapter's")
    return settings
