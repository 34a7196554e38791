"""Reads one prompt from any of the files that people have.

NumPy files (with `.npy` or, as google-research/prompt-tuning released them, without),
the checkpoints and run directories of this library, and PEFT adapters of the kinds
PROMPT_TUNING and P_TUNING. Nothing is unpickled.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from prompt_tuning.checkpoints import checkpoint_files, store
from prompt_tuning.errors import InputError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
ADAPTER_KINDS = ("PROMPT_TUNING", "P_TUNING")

_NUMPY_MAGIC = b"\x93NUMPY"
_logger = logging.getLogger(__name__)


def read_prompt(
    path: Path | str, on_damage: store.OnDamage = _logger.warning
) -> Float[np.ndarray, "P D"]:
    """Reads prompt vectors; their width is the caller's to check.

    Args:
      path: a NumPy file, a checkpoint directory, a run directory (its best checkpoint
        if the run kept one, else its latest), or a PEFT adapter's folder.
      on_damage: called with a message for each damaged checkpoint of a run directory
        that is passed over.

    Returns:
      The vectors in float32, whatever floating type the file has.

    Raises:
      InputError: if there is nothing there that is a prompt.
    """
    path = Path(path)
    if path.is_file():
        return _checked(_read_numpy(path), path)
    if not path.is_dir():
        raise InputError(f"{path} does not exist; expected a prompt's file or folder")
    names = {child.name for child in path.iterdir()}
    if names & {ADAPTER_CONFIG, ADAPTER_TENSORS, ADAPTER_PICKLE}:
        return _checked(_read_adapter(path), path)
    if checkpoint_files.STATE_FILE in names:
        return _checked(_read_checkpoint(path), path)
    folder = path / store.FOLDER if store.FOLDER in names else path
    if store.steps_in(folder):
        return _checked(_read_checkpoint(store.best_or_latest(folder, on_damage)), path)
    raise InputError(
        f"{path} holds no prompt: expected {store.FOLDER}/checkpoint_*, "
        f"{checkpoint_files.STATE_FILE} or {ADAPTER_CONFIG} in it"
    )


def _checked(array: np.ndarray, path: Path) -> Float[np.ndarray, "P D"]:
    """Refuses what cannot be prompt vectors, and casts the rest.

    Raises:
      InputError: unless the array is `[P, D]`, not empty, floating and finite.
    """
    if array.ndim != 2 or not array.size:
        raise InputError(
            f"{path} holds an array of shape {array.shape}, expected prompt vectors "
            "[P, D]"
        )
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{path} holds {array.dtype}, expected floating numbers")
    prompt = array.astype(np.float32)
    if not np.isfinite(prompt).all():
        count = int((~np.isfinite(prompt)).sum())
        raise InputError(f"{path}: {count} of {prompt.size} numbers are not finite")
    return prompt


def _read_numpy(path: Path) -> np.ndarray:
    """The array of a file in NumPy's format, whatever its name.

    Raises:
      InputError: if it is of another format, truncated, or holds pickled objects.
    """
    with path.open("rb") as file:
        start = file.read(len(_NUMPY_MAGIC))
        if start != _NUMPY_MAGIC:
            raise InputError(
                f"{path} begins with {start!r}, expected NumPy's {_NUMPY_MAGIC!r}; a "
                "PEFT adapter is named by its folder, and pickles are never read"
            )
        file.seek(0)
        try:
            return np.lib.format.read_array(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise InputError(f"{path} cannot be read: {error}") from error


def _read_checkpoint(directory: Path) -> np.ndarray:
    """The one trained leaf of a checkpoint.

    Raises:
      InputError: if it is damaged, or holds several trained leaves.
    """
    state = checkpoint_files.verify(directory)
    trained = checkpoint_files.read_trained(directory, state)
    if len(trained) != 1:
        files = [leaf["file"] for leaf in state["trained"].values()]
        raise InputError(
            f"{directory} holds {len(files)} trained leaves, expected one prompt; name "
            f"the file of the one that you mean: {files}"
        )
    return next(iter(trained.values()))


def _read_adapter(folder: Path) -> np.ndarray:
    """The vectors of a PEFT adapter that go before the input.

    PEFT saves, for an encoder-decoder, a second half that it neither trains nor uses
    (one per transformer submodule); only the first `num_virtual_tokens` rows count.

    Raises:
      InputError: if a file is missing or damaged, the adapter is of another kind, or
        its shape is not what its config says.
    """
    settings = _adapter_settings(folder)
    path = folder / ADAPTER_TENSORS
    if not path.is_file():
        raise InputError(
            f"{path} is missing; {ADAPTER_PICKLE}, if there, is a pickle, which could "
            "run anything: save the adapter again with safe_serialization=True"
        )
    try:
        with safe_open(path, "np") as file:
            names = list(file.keys())
            if "prompt_embeddings" not in names:
                raise InputError(f"{path} has {names}, expected 'prompt_embeddings'")
            rows = file.get_tensor("prompt_embeddings")
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    length = settings["num_virtual_tokens"]
    submodules = settings.get("num_transformer_submodules") or 1
    if rows.shape[:1] not in ((length,), (length * submodules,)):
        raise InputError(
            f"{path}: prompt_embeddings has shape {rows.shape}, expected {length} rows "
            f"or {submodules} times as many, as {ADAPTER_CONFIG} says"
        )
    return rows[:length]


def _adapter_settings(folder: Path) -> dict[str, Any]:
    """The config of a PEFT adapter whose vectors are a prompt.

    Raises:
      InputError: if it is missing, not JSON, of another kind, or without a length.
    """
    path = folder / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing beside the adapter") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    if kind not in ADAPTER_KINDS:
        raise InputError(
            f"{path} has peft_type {kind!r}; only {' and '.join(ADAPTER_KINDS)} save "
            "vectors that go before the input"
        )
    length = settings.get("num_virtual_tokens")
    if not isinstance(length, int) or length < 1:
        raise InputError(
            f"{path} has num_virtual_tokens {length!r}, expected a positive integer"
        )
    return settings
