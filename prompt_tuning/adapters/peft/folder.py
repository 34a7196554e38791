"""Read and write the folder of a PEFT adapter: its settings and arrays.

    adapter_config.json         settings: JSON, indented by 2, keys sorted
    adapter_model.safetensors   float32 arrays, with the metadata {"format": "pt"}

Old folders have `adapter_model.bin` instead, a pickle that is parsed but never run. The
files equal those of PEFT 0.21 (`save_pretrained`) byte for byte; older releases omit
some settings. `peft_conversion` interprets the arrays. LoRA folders of MLX are read,
too; see `read_mlx`.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from prompt_tuning.adapters.peft import expert_parameters
from prompt_tuning.adapters.peft.peft_settings import LARGEST, check_types
from prompt_tuning.adapters.peft.shape_checks import (
    LORA_A,
    LORA_B,
    MODEL_PREFIX,
    check_shapes,
)
from prompt_tuning.adapters.peft.tensor_names import without_adapter_name
from prompt_tuning.checkpoints.formats.safetensors import read_header
from prompt_tuning.checkpoints.formats.torch_archive import read_torch_archive
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.model_sizes import MAXIMUM_SIZE
from prompt_tuning.core.typed_json import JsonObject, read_json, read_object

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
README = "README.md"
CONVERSION = (
    'python -c "import torch, safetensors.torch as s; s.save_file({{n: x.contiguous() '
    f"for n, x in torch.load('{{folder}}/{PICKLE}', weights_only=True).items()}}}}, "
    f"'{{folder}}/{TENSORS}')\""
)


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """Contents of a PEFT adapter's folder.

    Attributes:
      settings: all of `adapter_config.json`, including unknown keys.
      tensors: float32 arrays by PEFT's names.
      source: origin of the adapter, for messages.
    """

    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]
    source: str = dataclasses.field(default="the adapter", compare=False)

    def with_tensors(self, tensors: dict[str, np.ndarray]) -> "AdapterFolder":
        """Returns the folder with other arrays."""
        return dataclasses.replace(self, tensors=tensors)

    @property
    def kind(self) -> str:
        """PEFT's name of the method, e.g. "LORA"."""
        return self.settings["peft_type"]


def find_folder(path: Path | str) -> Path | None:
    """Finds the folder with the adapter's files; None if there is none.

    PEFT puts an adapter with a name other than "default" into a subfolder of that name.

    Raises:
      InputError: if there is more than one adapter in subfolders, or the files are
        links out of the folder.
    """
    path = Path(path)
    if _is_adapter(path):
        check_links(path, CONFIG, TENSORS, PICKLE, MLX_TENSORS)
        return path
    if not path.is_dir():
        return None
    adapters = [child for child in sorted(path.iterdir()) if _is_adapter(child)]
    if len(adapters) > 1:
        names = ", ".join(str(child) for child in adapters)
        raise InputError(
            f"{path} has several adapters; name one of them: {shortened(names, 1000)}"
        )
    for adapter in adapters:
        check_links(path, adapter.name)
        check_links(adapter, CONFIG, TENSORS, PICKLE, MLX_TENSORS)
    return adapters[0] if adapters else None


def read_folder(path: Path | str) -> AdapterFolder:
    """Reads an adapter of any kind.

    Args:
      path: the adapter's folder, or the parent folder of a named adapter.

    Raises:
      InputError: if a file is missing or damaged, there is more than one adapter, or
        array shapes contradict the settings.
    """
    folder = find_folder(path)
    if folder is None:
        raise InputError(f"{path} has no {CONFIG}, so it is not a PEFT adapter")
    file, mlx = folder / TENSORS, folder / MLX_TENSORS
    if mlx.is_file() and not file.is_file():
        config = read_object(folder / CONFIG)
        return AdapterFolder(*read_mlx(config, _read_tensors(mlx), mlx))
    settings = _read_settings(folder / CONFIG)
    read_tensors = _read_tensors
    if not file.is_file():
        file, read_tensors = folder / PICKLE, _read_archive
    tensors = without_adapter_name(read_tensors(file), str(file))
    tensors = expert_parameters.name_parameters(settings, tensors, str(folder / CONFIG))
    check_shapes(settings, tensors, str(file))
    return AdapterFolder(settings, tensors)


def _read_archive(file: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a `torch.save` file as float32; see `_read_tensors`."""
    if not file.is_file():
        raise InputError(f"{file.with_name(TENSORS)} is missing, and {file.name} too")
    try:
        arrays = read_torch_archive(file)
    except InputError as error:
        command = CONVERSION.format(folder=file.parent)
        raise InputError(f"{error}; with torch, convert it by {command}") from error
    return {name: _finite(array, name, file) for name, array in arrays.items()}


def _finite(array: np.ndarray, name: str, file: Path) -> np.ndarray:
    """Returns an array as float32; checks that all numbers are finite."""
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{file}: {name} has numbers that are not finite")
    return array


def _read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a safetensors file as float32.

    Raises:
      InputError: if the file is damaged, or an array is not of finite floating-point
        numbers.
    """
    tensors = {}
    for name, stored in read_header(file).items():
        if stored.dtype.kind != "f" and stored.dtype.name != "bfloat16":
            raise InputError(
                f"{file}: {name} is {stored.dtype}, expected floating numbers"
            )
        tensors[name] = _finite(stored.read(), name, file)
    return tensors


def write_folder(
    path: Path | str, folder: AdapterFolder, *, force: bool = False
) -> None:
    """Writes an adapter's two files atomically.

    Args:
      path: folder to write; an existing model card is kept.
      folder: contents to write.
      force: whether to replace an adapter in this folder.

    Raises:
      InputError: if the folder has other files, or array shapes contradict the
        settings. Nothing is written then.
    """
    path = Path(path)
    check_shapes(folder.settings, folder.tensors, f"the adapter for {path}")
    contents = {
        CONFIG: json.dumps(folder.settings, indent=2, sort_keys=True).encode(),
        TENSORS: _encode(expert_parameters.wrap_parameters(folder.tensors)),
    }
    card = path / README
    if card.is_file():
        contents[README] = card.read_bytes()

    def write(directory: Path) -> None:
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    atomic_files.write_folder(path, write, known=(CONFIG, TENSORS, README), force=force)


def _encode(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes of a safetensors file; all arrays must be float32."""
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise InputError(f"{name} is {array.dtype}, expected float32")
    # safetensors would write the memory of a view in its own order.
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return save(arrays, metadata={"format": "pt"})


def _is_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, TENSORS, PICKLE))


def _read_settings(path: Path) -> dict[str, Any]:
    """Reads the settings of an adapter of any kind."""
    if not path.is_file():
        raise InputError(f"{path} is missing from the adapter")
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("peft_type"), str):
        raise InputError(f"{path} has no 'peft_type', so it is not a PEFT adapter's")
    check_types(JsonObject(str(path), content))
    return content


MLX_TENSORS = "adapters.safetensors"
"""Factors `{module}.lora_a` `[in, r]` and `.lora_b` `[r, out]` (`mlx_lm.lora`)."""
A, B = ".lora_a", ".lora_b"


def read_mlx(
    config: JsonObject, tensors: Mapping[str, np.ndarray], file: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns PEFT's settings and tensors for an MLX adapter with the same effect.

    MLX computes `y + scale * x @ a @ b`; PEFT stores the transposes, and scales by
    `alpha / r`. Modules are named as in transformers.

    Args:
      config: its settings.
      tensors: its float32 arrays.
      file: the file of the arrays, for messages.

    Raises:
      InputError: if it is not a LoRA of projections, or a factor is missing or has
        another rank.
    """
    kind = config.text("fine_tune_type", "lora")
    if kind != "lora":
        raise InputError(
            f"{config.source} has fine_tune_type {shown(kind)}, expected 'lora': "
            "fuse it into the model by mlx_lm.fuse, or train it as LoRA"
        )
    options = config.nested("lora_parameters")
    rank = options.integer("rank", minimum=1, maximum=MAXIMUM_SIZE)
    scale = options.number("scale", minimum=-LARGEST / rank, maximum=LARGEST / rank)
    names = {name.removesuffix(A).removesuffix(B) for name in tensors}
    converted: dict[str, np.ndarray] = {}
    for module in sorted(names):
        for part, axis, ending in ((A, 1, LORA_A), (B, 0, LORA_B)):
            array = tensors.get(module + part)
            if array is None:
                other = next(name for name in tensors if name.startswith(module))
                raise InputError(
                    f"{file} has {shortened(other)} and no {shortened(module + part)}, "
                    "expected both factors of each projection and nothing else"
                )
            if array.ndim != 2 or array.shape[axis] != rank:
                raise InputError(
                    f"{file}: {shortened(module + part)} has shape {array.shape}, "
                    f"expected rank {rank} on axis {axis}, by lora_parameters"
                )
            converted[f"{MODEL_PREFIX}{module}{ending}"] = np.ascontiguousarray(array.T)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": config.text("model", None),
        "lora_alpha": scale * rank,
        "lora_dropout": options.number("dropout", 0.0, minimum=0.0, maximum=1.0),
        "r": rank,
        "target_modules": sorted(names),
    }
    return settings, converted
