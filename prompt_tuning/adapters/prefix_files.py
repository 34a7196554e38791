"""Reads key/value prefixes from any of the files that users have.

These are runs and their checkpoints, PEFT folders of the kinds PREFIX_TUNING and
CARTRIDGE, NumPy and safetensors files `[L, 2, P, G, K]`, and what `torch.save` wrote of
a cartridge of HazyResearch/cartridges: lists with a tensor `[1, G, P, K]` for each
layer, `trainable_keys`, `trainable_values`, and perhaps `frozen_keys` and
`frozen_values` of the slots before them. Nothing is unpickled.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.peft import folder as peft_folder
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.adapters.prompt_files import (
    find_checkpoint,
    read_array,
    read_checkpoint,
)
from prompt_tuning.checkpoints.formats.torch_archive import read_torch_lists
from prompt_tuning.core.errors import InputError, shown

TORCH = (".pt", ".pth", ".bin")
KINDS = ("PREFIX_TUNING", "CARTRIDGE")


def read_prefix_file(
    path: Path | str, stack: tuple[int, int, int]
) -> Float[np.ndarray, "L 2 P G K"]:
    """Reads a prefix, in float32.

    Args:
      path: file or folder.
      stack: numbers of layers `L` and of key/value heads `G`, and their width `K`.

    Raises:
      InputError: if there is no prefix, or it belongs to a model of another shape.
    """
    path = Path(path)
    if path.is_file():
        torch = path.suffix in TORCH
        prefix = _read_cartridge(path) if torch else read_array(path)
    elif not path.is_dir():
        raise InputError(f"{path} does not exist; expected a prefix's file or folder")
    elif (checkpoint := find_checkpoint(path)) is not None:
        prefix = read_checkpoint(checkpoint)
    else:
        prefix = _read_adapter(path, stack)
    found = tuple(prefix.shape)
    layers, groups, width = stack
    if len(found) != 5 or found != (layers, 2, found[2], groups, width):
        raise InputError(
            f"{path} has an array of shape {found}, expected a prefix ({layers}, 2, P, "
            f"{groups}, {width}): layers, keys and values, slots, key/value heads and "
            "their width; was it trained on another model?"
        )
    prefix = prefix.astype(np.float32)
    if not np.isfinite(prefix).all():
        raise InputError(f"{path} has numbers that are not finite")
    return prefix


def _read_cartridge(file: Path) -> np.ndarray:
    lists = read_torch_lists(file)
    parts = []
    for kind in ("frozen", "trainable"):
        keys, values = (lists.get(f"{kind}_{x}", []) for x in ("keys", "values"))
        shapes = {array.shape for array in (*keys, *values)}
        if len(shapes) > 1 or len(keys) != len(values):
            raise InputError(f"{file}: its {kind} tensors differ in shape or number")
        if keys:
            both = np.stack([np.concatenate(keys), np.concatenate(values)], axis=1)
            parts.append(both.astype(np.float32))  # [L, 2, G, P, K]
    if not parts or parts[-1].ndim != 5:
        raise InputError(
            f"{file} has {shown(sorted(lists))}, expected trainable_keys and "
            "trainable_values of a cartridge"
        )
    return np.concatenate(parts, axis=3).swapaxes(2, 3)


def _read_adapter(folder: Path, stack: tuple[int, int, int]) -> np.ndarray:
    adapter = peft_folder.read_folder(folder)
    if adapter.kind not in KINDS:
        raise InputError(
            f"{folder} has peft_type {shown(adapter.kind)}, expected a prefix: "
            f"{' or '.join(KINDS)}"
        )
    layers, groups, width = stack
    table = adapter.tensors[EMBEDDINGS]
    if table.shape[1] != 2 * layers * groups * width:
        return table  # refused with its shape
    return table.reshape(-1, layers, 2, groups, width).transpose(1, 2, 0, 3, 4)
