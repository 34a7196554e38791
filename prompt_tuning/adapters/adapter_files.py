"""Adapters in the files that people have, as our parameters by path, and back.

    PEFT folder                        any kind that `checkpoints.peft` reads
    run directory or checkpoint        its trained leaves
    folder of a T5X prompt             `encoder.prompt.prompt.prompt`, NumPy's format
    .npy, .safetensors, no extension   one array: a prompt `[P, D]`, a deep prompt
                                       `[L, P, D]`, a prefix `[L, 2, P, G, K]`

google-research/prompt-tuning names a parameter by its modules, of which it has one more
than we do: their `encoder/prompt/prompt/prompt` is our `encoder/prompt/prompt`.
"""

import io
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from prompt_tuning.adapters.adapter import (
    ADDED_DEEP,
    DEEP,
    IA3,
    LORA,
    MULTITASK,
    PREFIX,
    PROMPT,
    Adapter,
    Arrays,
)
from prompt_tuning.adapters.peft.conversion import from_peft
from prompt_tuning.adapters.peft.folder import find_folder, read_folder
from prompt_tuning.adapters.peft.prompts import PREFIX_PATH, STACKS
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.adapters.prompt_files import find_checkpoint, read_array
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig

SCALINGS = "scalings"
PROMPT_PATHS = ("encoder/prompt/prompt", "decoder/prompt/prompt")
_T5X = {f"{stack}.prompt.prompt.prompt": stack for stack in ("encoder", "decoder")}


def read_adapter(path: Path | str, config: ModelConfig | None) -> Adapter:
    """An adapter from any of the above.

    Args:
      path: where it is.
      config: the model that it is for; None where that is not known, which is enough
        for arrays whose name or shape says where they belong.

    Raises:
      InputError: if there is nothing there that we can read for this model.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; expected an adapter's file or folder")
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        parameters, scalings = _read_checkpoint(checkpoint)
        kind = kind_of(parameters, str(checkpoint))
        return Adapter(kind=kind, parameters=parameters, scalings=scalings)
    if find_folder(path) is not None:
        if config is None:
            raise InputError(
                f"{path} is PEFT's, and what its tensors are depends on the model: say "
                "which one it is for (convert --base_model)"
            )
        return from_peft(read_folder(path), config, str(path))
    files = [path] if path.is_file() else [path / name for name in _T5X]
    parameters: Arrays = {}
    for file in files:
        if file.is_file():
            array = _float32(read_array(file), file)
            parameters[_path_of(file, array, config)] = array
    if not parameters:
        raise InputError(
            f"{path} holds no adapter: expected PEFT's files, {FOLDER}/checkpoint_*, "
            f"or {' and '.join(_T5X)}"
        )
    return Adapter(kind=kind_of(parameters, str(path)), parameters=parameters)


def kind_of(parameters: Arrays, source: str) -> str:
    """The method of some parameters, by their paths and axes.

    Raises:
      InputError: if they are of several methods, or of one that has to be evaluated by
        its module first.
    """
    kinds = {path: _kind(path, array) for path, array in parameters.items()}
    if ADDED_DEEP in kinds.values():
        kinds = {p: ADDED_DEEP if p in PROMPT_PATHS else k for p, k in kinds.items()}
    unknown = [path for path, kind in kinds.items() if kind is None]
    if unknown or len(set(kinds.values())) != 1:
        what = unknown or sorted(parameters)
        raise InputError(
            f"{source} holds {', '.join(what[:5])}, which is not one adapter of a kind "
            "known by its names; convert the run's directory, which knows its modules"
        )
    return str(next(iter(kinds.values())))


def _kind(path: str, array: np.ndarray) -> str | None:
    leaf = path.rsplit("/", 1)[-1]
    if "/adapters/lora/" in path:
        return LORA
    if "/adapters/ia3/" in path:
        return IA3
    if leaf in ("shared", "columns", "rows"):
        return MULTITASK
    if path.endswith("/prompt/added"):
        return ADDED_DEEP
    if path in PROMPT_PATHS:
        return {2: PROMPT, 3: DEEP, 5: PREFIX}.get(array.ndim)
    return None


def _read_checkpoint(directory: Path) -> tuple[Arrays, dict[str, float]]:
    """Trained leaves, and the scalings that a converted checkpoint notes."""
    state = checkpoint_files.verify(directory)
    trained = checkpoint_files.read_trained(directory, state)
    return trained, state["extra"].get(SCALINGS, {})


def _path_of(file: Path, array: np.ndarray, config: ModelConfig | None) -> str:
    """Our path of a lone array: by its file's name, its axes, or the model."""
    for name in (file.name, file.stem):
        if name in _T5X:
            return f"{_T5X[name]}/prompt/prompt"
        if name.replace(".", "/") in PROMPT_PATHS:
            return name.replace(".", "/")
    if array.ndim == 5:
        return PREFIX_PATH
    if array.ndim not in (2, 3):
        raise InputError(
            f"{file} holds an array of shape {array.shape}, expected a prompt [P, D], "
            "a deep one [L, P, D] or a key/value prefix [L, 2, P, G, K]"
        )
    stack = STACKS[config.architecture] if config else "decoder"
    return f"{stack}/prompt/prompt"


def _float32(array: np.ndarray, file: Path) -> np.ndarray:
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{file} holds {array.dtype}, expected floating numbers")
    array = array.astype(np.float32)
    if not array.size or not np.isfinite(array).all():
        raise InputError(
            f"{file} holds an array of shape {array.shape} with numbers that are not "
            "finite, or with none"
        )
    return array


def write_checkpoint(folder: Path, adapter: Adapter, source: str) -> Path:
    """Writes trained leaves as a run's checkpoint 0, to start other runs from.

    Args:
      folder: an empty or a new one.
      adapter: what to write.
      source: where it comes from, noted beside it.

    Returns:
      the checkpoint's folder.

    Raises:
      InputError: if something is there already.
    """
    atomic_files.check_writable(folder)
    extra = {"source": source, SCALINGS: dict(adapter.scalings)}
    return CheckpointStore(folder).save(0, adapter.parameters, (), extra)


def write_array(file: Path, adapter: Adapter, *, force: bool = False) -> None:
    """Writes an adapter of one array, as `.npy` or as safetensors by the file's name.

    Servers that take prompt embeddings read a lone tensor `[P, D]`.

    Raises:
      InputError: if it has several arrays, or the file is there.
    """
    if len(adapter.parameters) != 1:
        raise InputError(
            f"the adapter has {len(adapter.parameters)} arrays "
            f"({', '.join(sorted(adapter.parameters)[:4])}), and {file} is for one; "
            "write a checkpoint or a PEFT folder"
        )
    ((path, array),) = adapter.parameters.items()
    _check_place(file, path, array)
    if file.suffix == ".safetensors":
        array = np.ascontiguousarray(array)
        atomic_files.write_file(file, save({EMBEDDINGS: array}), force=force)
    else:
        atomic_files.write_file(file, _numpy_bytes(array), force=force)


def _check_place(file: Path, path: str, array: np.ndarray) -> None:
    """Refuses a name that would not lead the array back to where it belongs.

    Raises:
      InputError: with a name that does.
    """
    read_back = _path_of(file, array, None)
    prefix_of_t5 = path.startswith("encoder/") and array.ndim == 5
    if prefix_of_t5 and read_back != path:
        name = f"{path.replace('/', '.')}{file.suffix}"
        raise InputError(
            f"{file} would be read as a prefix of the decoder, and this one is the "
            f"encoder's: name the file {name}, which says so"
        )


def write_t5x(folder: Path, adapter: Adapter, *, force: bool = False) -> list[Path]:
    """Writes prompts by the names that google-research/prompt-tuning gives them.

    Returns:
      the files.

    Raises:
      InputError: for anything but prompts `[P, D]`, or if other files are there.
    """
    if adapter.kind != PROMPT:
        raise InputError(
            f"T5X has no names for an adapter of kind {adapter.kind}; expected prompts "
            "[P, D] of the encoder or the decoder"
        )
    names = {stack: name for name, stack in _T5X.items()}
    contents = {
        names[path.split("/")[0]]: _numpy_bytes(array)
        for path, array in adapter.parameters.items()
    }

    def write(directory: Path) -> None:
        for name, content in contents.items():
            (directory / name).write_bytes(content)

    atomic_files.write_folder(folder, write, known=_T5X, force=force)
    return [folder / name for name in contents]


def _numpy_bytes(array: np.ndarray) -> bytes:
    """An array in NumPy's format, rows first."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()
