"""Reads and writes adapters in the formats that users have.

    PEFT folder                        any kind that `adapters.peft` reads
    run directory or checkpoint        its trained leaves
    folder of a T5X prompt             `encoder.prompt.prompt.prompt`, in NumPy's format
    .npy, .safetensors, no extension   one array: a prompt `[P, D]` or `[1, P, D]`, a
                                       deep prompt `[L, P, D]`, a prefix
                                       `[L, 2, P, G, K]`, perhaps in int8

google-research/prompt-tuning has one more module than we do in a parameter's name:
their `encoder/prompt/prompt/prompt` is our `encoder/prompt/prompt`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from prompt_tuning.adapters.adapter import PROMPT, Adapter, Arrays
from prompt_tuning.adapters.peft.folder import find_folder, read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.adapters.peft.prompts import STACKS
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.adapters.peft.table_copies import FrozenReader
from prompt_tuning.adapters.prompt_files import find_checkpoint, read_array, to_int8
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_files import STATE_FILE
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, checkpoint_path
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.numpy_files import numpy_bytes
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.prompts.adapter_kinds import (
    find_kind,
    find_prompt_class,
    prompt_classes,
)
from prompt_tuning.prompts.initializers import PREFIX_DIMENSIONS
from prompt_tuning.prompts.prompt_module import Attachment
from prompt_tuning.prompts.weight_starts import plain_factors

SCALINGS = "scalings"
LEAF = "prompt"
"""The leaf of a prompt that is one array."""
PROMPT_PATHS = ("encoder/prompt/prompt", "decoder/prompt/prompt")
_T5X = {f"{stack}.prompt.prompt.prompt": stack for stack in ("encoder", "decoder")}


def read_adapter(
    path: Path | str, config: ModelConfig | None, frozen: FrozenReader | None = None
) -> Adapter:
    """Reads an adapter in any of these formats.

    Args:
      path: file or folder of the adapter.
      config: config of the adapter's model; None if unknown, which is enough for arrays
        with a name or shape that determines their path.
      frozen: reads parameters of that model; see `from_peft`.

    Raises:
      InputError: if the path contains nothing that can be read for this model.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; expected an adapter's file or folder")
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        parameters, scalings = _read_checkpoint(checkpoint)
        kind = find_kind(parameters, str(checkpoint))
        parameters = plain_factors(parameters)
        return Adapter(kind=kind, parameters=parameters, scalings=scalings)
    if find_folder(path) is not None:
        if config is None:
            raise InputError(
                f"{path} is a PEFT adapter, and the meaning of its tensors depends on "
                "the model: set the model that it is for (convert --base_model)"
            )
        return from_peft(read_folder(path), config, str(path), frozen)
    check_links(path, *_T5X)
    files = [path] if path.is_file() else [path / name for name in _T5X]
    parameters: Arrays = {}
    for file in files:
        if file.is_file():
            array = _without_batch(_as_float32(read_array(file), file), config)
            parameters[_find_path(file, array, config)] = array
    if not parameters:
        raise InputError(
            f"{path} does not contain an adapter: expected PEFT's files, "
            f"{FOLDER}/checkpoint_*, or {' and '.join(_T5X)}"
        )
    return Adapter(kind=find_kind(parameters, str(path)), parameters=parameters)


def _read_checkpoint(directory: Path) -> tuple[Arrays, dict[str, float]]:
    """Reads the trained leaves, and a converted checkpoint's scalings."""
    state = checkpoint_files.verify(directory)
    trained = checkpoint_files.read_trained(directory, state)
    return trained, read_scalings(directory, state)


def read_scalings(directory: Path, state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scaling of each LoRA in a converted checkpoint, else nothing.

    Raises:
      InputError: if they are not numbers by path.
    """
    extra = JsonObject(f"{directory / STATE_FILE}", state["extra"])
    scalings = extra.nested(SCALINGS, {})
    return {path: scalings.number(path) for path in scalings.values}


def _find_path(file: Path, array: np.ndarray, config: ModelConfig | None) -> str:
    """Returns our path of a lone array, by its file's name, its axes or the model."""
    for name in (file.name, file.stem):
        if name in _T5X:
            return f"{_T5X[name]}/prompt/{LEAF}"
        if name.replace(".", "/") in PROMPT_PATHS:
            return name.replace(".", "/")
    prompt_class = find_prompt_class({LEAF: array.shape})
    if prompt_class is None:
        forms = [found.form for found in prompt_classes().values() if found.form]
        lone = [form for form in forms if form.axes.keys() == {LEAF}]
        shapes = [
            f"{form.kind} [{form.axes[LEAF].replace(' ', ', ')}]" for form in lone
        ]
        raise InputError(
            f"{file} contains an array of shape {array.shape}, expected the axes of "
            f"one of {', '.join(shapes)}"
        )
    # A lone prefix is the decoder's, as in PEFT.
    if config is None or prompt_class.attachment is Attachment.KEYS_AND_VALUES:
        return f"decoder/prompt/{LEAF}"
    stack = STACKS[config.architecture]
    return f"{stack}/prompt/{LEAF}"


def _without_batch(array: np.ndarray, config: ModelConfig | None) -> np.ndarray:
    """Removes the batch axis of a prompt `[1, P, D]`.

    In a model with one layer, such an array is a deep prompt `[L, P, D]` and stays.
    """
    is_batch = array.ndim == 3 and len(array) == 1
    return array[0] if is_batch and config is not None and config.layers > 1 else array


def _as_float32(array: np.ndarray, file: Path) -> np.ndarray:
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{file} contains {array.dtype}, expected floating numbers")
    array = array.astype(np.float32)
    if not array.size or not np.isfinite(array).all():
        raise InputError(
            f"{file} contains an array of shape {array.shape} that is empty or has "
            "numbers that are not finite"
        )
    return array


def write_checkpoint(folder: Path, adapter: Adapter, source: str) -> Path:
    """Writes an adapter as a run's checkpoint 0, for other runs to start from.

    The checkpoint records `source`, the adapter's origin. Returns its folder.

    Raises:
      InputError: if the folder exists and is not empty.
    """
    if adapter.settings.get("alora_invocation_tokens"):
        raise InputError(
            "a checkpoint does not record the tokens that invoke an adapter (aLoRA): "
            "read its PEFT folder instead"
        )
    extra = {"source": source, SCALINGS: dict(adapter.scalings)}

    def write(new: Path) -> None:
        CheckpointStore(new).save(0, adapter.parameters, (), extra)

    atomic_files.write_folder(folder, write)
    return checkpoint_path(folder / FOLDER, 0)


def write_array(
    file: Path, adapter: Adapter, *, int8: bool = False, force: bool = False
) -> None:
    """Writes an adapter with one array, as `.npy` or safetensors by the file's name.

    Inference servers that accept prompt embeddings read a lone tensor `[P, D]`. `int8`
    stores a prefix in int8.

    Raises:
      InputError: if the adapter has more than one array, is not a prefix although it
        should be, or the file exists and `force` is not set.
    """
    if len(adapter.parameters) != 1:
        raise InputError(
            f"the adapter has {len(adapter.parameters)} arrays "
            f"({shown(sorted(adapter.parameters)[:4])}), but {file} can contain "
            "only one; write a checkpoint or a PEFT folder"
        )
    ((path, array),) = adapter.parameters.items()
    _check_name(file, path, array)
    if int8 and array.ndim != PREFIX_DIMENSIONS:
        raise InputError(
            f"the adapter is an array of shape {array.shape}, and int8 is a form of "
            "key/value prefixes [L, 2, P, G, K]: write safetensors"
        )
    if file.suffix == ".safetensors":
        tensors = to_int8(array) if int8 else {EMBEDDINGS: np.ascontiguousarray(array)}
        atomic_files.write_file(file, save(tensors), force=force)
    else:
        atomic_files.write_file(file, numpy_bytes(array), force=force)


def _check_name(file: Path, path: str, array: np.ndarray) -> None:
    """Checks that a prefix's file name leads back to its stack.

    Raises:
      InputError: suggests a name that does.
    """
    path_read_back = _find_path(file, array, None)
    is_encoder_prefix = path.startswith("encoder/") and array.ndim == 5
    if is_encoder_prefix and path_read_back != path:
        name = f"{path.replace('/', '.')}{file.suffix}"
        raise InputError(
            f"{file} would be read as a prefix of the decoder, but this is the "
            f"encoder's: name the file {name}, which identifies it"
        )


def write_t5x(folder: Path, adapter: Adapter, *, force: bool = False) -> list[Path]:
    """Writes prompts under the names of google-research/prompt-tuning.

    Returns the written files.

    Raises:
      InputError: for anything but prompts `[P, D]`, or if the folder has other files.
    """
    if adapter.kind != PROMPT:
        raise InputError(
            f"T5X has no names for an adapter of kind {adapter.kind}; expected prompts "
            "[P, D] of the encoder or the decoder"
        )
    names = {stack: name for name, stack in _T5X.items()}
    contents = {
        names[path.split("/")[0]]: numpy_bytes(array)
        for path, array in adapter.parameters.items()
    }

    def write(directory: Path) -> None:
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    atomic_files.write_folder(folder, write, known=_T5X, force=force)
    return [folder / name for name in contents]
