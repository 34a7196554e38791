"""Read one prompt from all kinds of files, and encode prefixes in int8.

These are NumPy files (with `.npy` or, as google-research/prompt-tuning released them,
without), safetensors files of one tensor, checkpoints and run directories of this
library, and PEFT adapters of the kinds PROMPT_TUNING, P_TUNING and CPT. Nothing is
unpickled.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.peft import folder as peft_folder
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.checkpoints.formats.safetensors import read_header
from prompt_tuning.checkpoints.run_store import (
    checkpoint_files,
    checkpoint_names,
    checkpoint_selection,
)
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.numpy_files import read_npy
from prompt_tuning.core.quantization.channels import channel_scale, quantize

CODES, SCALES = "prefix_codes", "prefix_scales"
"""Names of a file's tensors, `[L, 2, P, G, K]` and `[L, 2, P, G]`."""


def to_int8(prefix: Float[np.ndarray, "L 2 P G K"]) -> dict[str, np.ndarray]:
    """Returns the tensors that encode a prefix, with a scale per head and slot.

    A vector of `K` numbers takes `K + 4` bytes: half of bfloat16.
    """
    vectors = np.asarray(prefix, np.float32)[..., None]  # [L, 2, P, G, K, 1]
    scale = np.asarray(channel_scale(vectors))
    codes = np.asarray(quantize(vectors, scale))
    return {CODES: codes[..., 0], SCALES: scale[..., 0]}


def from_int8(
    tensors: Mapping[str, np.ndarray], source: str
) -> Float[np.ndarray, "L 2 P G K"]:
    """Decodes the prefix in some tensors.

    Raises:
      InputError: if their types or shapes are not what `to_int8` writes.
    """
    codes, scales = tensors[CODES], tensors[SCALES]
    kinds = (codes.dtype, scales.dtype) == (np.int8, np.float32)
    if not kinds or codes.ndim != 5 or scales.shape != codes.shape[:-1]:
        found = {name: f"{x.dtype}{list(x.shape)}" for name, x in tensors.items()}
        raise InputError(
            f"{source} has {shown(found)}, expected int8 [L, 2, P, G, K] and a float32 "
            "scale [L, 2, P, G] of each head of each slot"
        )
    return codes * scales[..., None]


SAFETENSORS = ".safetensors"
ADAPTER_KINDS = ("PROMPT_TUNING", "P_TUNING", "CPT")

_logger = logging.getLogger(__name__)


def read_prompt(
    path: Path | str, on_damage: checkpoint_selection.OnDamage = _logger.warning
) -> Float[np.ndarray, "P D"]:
    """Reads prompt vectors; the caller checks their width.

    Args:
      path: a NumPy or safetensors file, a checkpoint, a run directory (its best
        checkpoint if it kept one, else the latest), or the folder of a PEFT adapter.
      on_damage: called with a message for each damaged checkpoint that is skipped.

    Returns:
      the vectors in float32, whatever the file's floating-point type.

    Raises:
      InputError: if there is no prompt at the path.
    """
    path = Path(path)
    if path.is_file():
        return _check_prompt(read_array(path), path)
    if not path.is_dir():
        raise InputError(f"{path} does not exist; expected a prompt's file or folder")
    checkpoint = find_checkpoint(path, on_damage)
    if checkpoint is not None:
        return _check_prompt(read_checkpoint(checkpoint), path)
    if peft_folder.find_folder(path) is not None:
        return _check_prompt(_read_adapter(path), path)
    raise InputError(
        f"{path} does not contain a prompt: expected "
        f"{checkpoint_names.FOLDER}/checkpoint_*, {checkpoint_files.STATE_FILE} or "
        f"{peft_folder.CONFIG} in it"
    )


def find_checkpoint(
    path: Path, on_damage: checkpoint_selection.OnDamage = _logger.warning
) -> Path | None:
    """Finds the checkpoint that a folder is or contains.

    In a run directory this is the best checkpoint if the run kept one, else the latest.

    Raises:
      InputError: if all checkpoints of the folder are damaged.
    """
    names = {child.name for child in path.iterdir()} if path.is_dir() else set()
    if checkpoint_files.STATE_FILE in names:
        return path
    folder = (
        path / checkpoint_names.FOLDER if checkpoint_names.FOLDER in names else path
    )
    if checkpoint_names.steps_in(folder):
        return checkpoint_selection.best_or_latest(folder, on_damage)
    return None


def read_array(path: Path) -> np.ndarray:
    """Reads the only array of a safetensors file, or of a NumPy file of any name.

    A prefix in int8 is decoded; see `to_int8`.

    Raises:
      InputError: if the file is damaged, of another format, or has more than one array.
    """
    if path.suffix != SAFETENSORS:
        return read_npy(path)
    if (path.parent / peft_folder.CONFIG).is_file():
        raise InputError(f"{path} is part of an adapter; name its folder")
    stored = read_header(path)
    if stored.keys() == {CODES, SCALES}:
        tensors = {name: tensor.read() for name, tensor in stored.items()}
        return from_int8(tensors, str(path))
    if len(stored) != 1:
        raise InputError(
            f"{path} has {len(stored)} tensors, expected one: "
            f"{shown(sorted(stored)[:5])}"
        )
    return next(iter(stored.values())).read()


def _check_prompt(array: np.ndarray, path: Path) -> Float[np.ndarray, "P D"]:
    """Checks that an array can be prompt vectors, and casts it.

    Raises:
      InputError: unless the array is `[P, D]` or, as a batch of one, `[1, P, D]`, and
        not empty, floating-point and finite.
    """
    array = array[0] if array.ndim == 3 and len(array) == 1 else array
    if array.ndim != 2 or not array.size:
        raise InputError(
            f"{path} contains an array of shape {array.shape}, expected prompt vectors "
            "[P, D]"
        )
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(f"{path} contains {array.dtype}, expected floating numbers")
    prompt = array.astype(np.float32)
    if not np.isfinite(prompt).all():
        count = int((~np.isfinite(prompt)).sum())
        raise InputError(f"{path}: {count} of {prompt.size} numbers are not finite")
    return prompt


def read_checkpoint(directory: Path) -> np.ndarray:
    """Reads the only trained leaf of a checkpoint.

    Raises:
      InputError: if the checkpoint is damaged, or has more than one trained leaf.
    """
    state = checkpoint_files.verify(directory)
    if len(state["trained"]) != 1:
        names = [leaf.get("file", path) for path, leaf in state["trained"].items()]
        raise InputError(
            f"{directory} has {len(names)} trained leaves, expected one prompt; name "
            f"the file of one of them: {names}"
        )
    return next(iter(checkpoint_files.read_trained(directory, state).values()))


def _read_adapter(folder: Path) -> np.ndarray:
    """Reads the prompt vectors of a PEFT adapter.

    For an encoder-decoder PEFT saves a second half that it neither trains nor uses;
    only the first `num_virtual_tokens` rows count.
    """
    adapter = peft_folder.read_folder(folder)
    if adapter.kind not in ADAPTER_KINDS:
        raise InputError(
            f"{folder} has peft_type {shown(adapter.kind)}; only "
            f"{', '.join(ADAPTER_KINDS)} save prompt vectors"
        )
    return adapter.tensors[EMBEDDINGS][: adapter.settings["num_virtual_tokens"]]
